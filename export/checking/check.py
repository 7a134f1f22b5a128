"""Compare the written graph in ONNX Runtime with the checkpoint in torch, call by call: every export checks itself."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import onnx_ir as ir
import torch
from torch import Tensor

from ...engines import (
    FEATURES,
    ROW,
    SOURCE,
    SOURCES,
    TAILS,
    WINDOW,
    Contract,
    EncoderContract,
    Engine,
    ExportError,
    Recurrence,
    State,
    cache_rows,
    make_step,
    open_engine,
)
from ..passes.spell_fp4 import spell_fp4
from ..passes.widen import widen
from ..tracing.hidden_states import NO_FEATURES, Features
from .oracle import behind_first, branch_features, branch_logits, cached_rows, continued_logits
from .quality import Sample, engine_logits, measure
from .scenarios import ROWS, Call, RowCall, Script, leaves_of, line_of, random_tree, write_script

Written = TypeVar("Written", Contract, EncoderContract)
TOLERANCE = 1e-3
"""Largest allowed error, in standard deviations of the checkpoint's logits. float32 rounding stays below 1e-4 of
them even in deep models with large activations; a wrong weight, mask, window or position moves logits by 1e-1.
Within it the best token is the same wherever it leads by twice as much."""

DEEP_CACHE_BYTES = 80 << 20  # in float32: reaches the last position of the smaller GPT2
SEED = 0
GARBAGE = 5  # entries behind the longest source
HALF = 24  # slots of a row that one of its calls may fill


@dataclass(frozen=True)
class Reference:
    """The checkpoint's answers, computed before the graph is opened: the two need not be in memory together."""

    script: Script
    branches: list[Tensor]  # [length, V] of each branch
    features: list[Tensor]  # [length, size] of each branch, if heads read some
    made: list[Tensor]  # rows of each cache buffer, as the model makes them: [1, kv_heads, rows, D]
    deep: list[Call]  # each continues a long cache of such rows
    deep_logits: list[Tensor]  # [live, V] of each
    scale: float  # the standard deviation of the logits
    sources: list[list[Tensor]]  # what each row finds of its source: of each state [1, heads, S, D]
    sample: Sample
    sample_logits: Tensor  # [L, V], of the checkpoint as it is, whatever its weights are rounded to afterwards


def make_reference(
    model: Any,
    contract: Contract,
    window: int | None,
    sample: Sample,
    sample_logits: Tensor,
    features: Mapping[str, Features] = NO_FEATURES,
    sources: Sequence[Tensor] = (),
    look_aheads: int = 0,
) -> Reference:
    """Compute what the checkpoint says of all calls; each row's text stands behind its source, if there are `sources`.

    They are as the encoder has made them. Long texts, and the sample's, are behind the first.
    """
    contract = contract.in_dtype("float32")  # in which both sides compute
    script = write_script(sample.vocab_size, contract.max_length, contract.recurrent, TAILS in contract.capabilities)
    script.look_ahead([contract.vocab_size + place for place in range(look_aheads)])
    branches = branch_logits(model, script.branches) if not sources else _behind_each(model, script, sources)
    deep, made, deep_logits = list[Call](), list[Tensor](), list[Tensor]()
    if not contract.recurrent:  # whose states no cache could be filled with
        deep = _deep_calls(contract, sample.vocab_size, window)
        with behind_first(model, sources):
            made = cached_rows(model, max(script.branches, key=len))
            deep_logits = [_deep_logits(model, made, call.rows[0]) for call in deep]
    noted = branch_features(model, script.branches, features)
    found = [model.made_of(hidden) for hidden in sources]
    scale = float(branches[0].std())
    return Reference(script, branches, noted, made, deep, deep_logits, scale, found, sample, sample_logits)


def _behind_each(model: Any, script: Script, sources: Sequence[Tensor]) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for row, hidden in enumerate(sources):
        own = [number for number, place in enumerate(script.rows) if place == row]
        with model.behind(hidden):
            found |= zip(own, branch_logits(model, [script.branches[number] for number in own]), strict=True)
    return [found[number] for number in range(len(script.branches))]


class Errors:
    """The worst error of each scenario, in the units of logits whose standard deviation is `scale`."""

    def __init__(self, scale: float) -> None:
        self.scale, self.allowed = scale, TOLERANCE * scale
        self.worst: dict[str, float] = {}

    def compare(self, scenario: str, found: Tensor, expected: Tensor, scale: float = 0.0) -> None:
        """Note how far off these are; of what has another `scale` than logits, how far they would be."""
        error = float((found - expected).abs().max().nan_to_num(nan=float("inf")))
        self.worst[scenario] = max(error * self.scale / (scale or self.scale), self.worst.get(scenario, 0.0))

    def report(self, graph: Path) -> dict[str, Any]:
        """Return all errors for the manifest, or refuse the graph for one that is too large."""
        scenario, worst = max(self.worst.items(), key=lambda item: item[1])
        if worst > self.allowed:
            raise ExportError(
                f"the {graph.parent.name} graph does not compute what its checkpoint computes: in the scenario "
                f"{scenario!r} a logit is off by {worst:.2g}, expected at most {self.allowed:.2g} ({TOLERANCE} of "
                "their standard deviation); please report it"
            )
        return {
            "worst_error": worst,
            "tolerance": self.allowed,
            "logit_std": self.scale,
            "errors": self.worst,
        }


@contextmanager
def in_float32(graph: Path, contract: Written) -> Iterator[tuple[Path, Written]]:
    """Give a graph that the CPU has kernels for, itself or a copy, until the block ends.

    It computes in float32 on the same weights file, and has no numbers of four bits.
    """
    model = ir.load(graph)
    widened = 0 if contract.dtype == "float32" else widen(model)
    if not widened + spell_fp4(model):
        yield graph, contract
        return
    copy = graph.with_name("float32_copy.onnx")
    ir.save(model, copy)
    try:
        yield copy, contract.in_dtype("float32")
    finally:
        copy.unlink()


def check_graph(
    graph: Path, contract: Contract, reference: Reference, kind: str = "none"
) -> tuple[dict[str, Any], Tensor]:
    """Run every call and fail if an error exceeds the tolerance; returns the errors, for the manifest.

    The reference of a quantised graph must have the rounded weights. What rounding has cost is measured separately, on
    the sample: its logits `[L, V]` from the graph as it will run are returned, too.
    """
    errors, quantised, wide_copy = Errors(reference.scale), kind != "none", contract.dtype != "float32"
    with in_float32(graph, contract) as (graph, contract):
        engine = open_engine("onnxruntime", graph, contract, exact_weights=quantised)
        try:
            cache, recurrence = _cache(contract, ROWS, reference.script.capacity), Recurrence(ROWS, HALF, engine.device)
            cache |= _sources(contract, reference.sources)
            for call in reference.script.calls:
                for row, logits in zip(call.rows, run_call(engine, cache, call, recurrence), strict=True):
                    places = zip(row.branches, row.depths, strict=False)  # of the real ones
                    expected = torch.stack([reference.branches[branch][row.start + depth] for branch, depth in places])
                    errors.compare(call.scenario, logits[: row.live], expected)
            for place, branch in enumerate(reference.script.current if reference.features else ()):
                wanted = reference.features[branch]
                found = cache[FEATURES][place, 0, : len(wanted)]
                errors.compare(FEATURES, found, wanted, float(wanted.std()))
            for call, expected in zip(reference.deep, reference.deep_logits, strict=True):
                [row] = call.rows
                cache = _cache_holding(contract, reference.made, row.start, len(row.tokens))
                cache |= _sources(contract, reference.sources[:1])
                errors.compare(call.scenario, run_call(engine, cache, call)[0, : row.live], expected)
            if quantised:
                engine.close()
                engine = open_engine("onnxruntime", graph, contract)
            sample_logits = engine_logits(engine, reference.sample.tokens, _sources(contract, reference.sources[:1]))
        finally:
            engine.close()
    report = errors.report(graph) | {
        "as_float32_copy": wide_copy,
        "quality": asdict(measure(reference.sample_logits, sample_logits, reference.sample.tokens)),
    }
    return report, sample_logits


def worse(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the larger of the errors of two graphs of one model, and what else there is of the second."""
    errors = {scenario: max(error, second["errors"][scenario]) for scenario, error in first["errors"].items()}
    return {**second, "errors": errors, "worst_error": max(errors.values())}


def run_call(engine: Engine, cache: Mapping[str, Tensor], call: Call, recurrence: Recurrence | None = None) -> Tensor:
    """Return the logits of all tokens `[B, S, V]`, and move the entries of those that are accepted into order."""
    width = len(call.rows[0].tokens)
    given = {"input_ids": [row.tokens for row in call.rows], "start": [row.start for row in call.rows]}
    if any(row.parents != line_of(width) for row in call.rows):
        given |= {"depths": [row.told for row in call.rows], "ancestors": [row.ancestors for row in call.rows]}
    inputs = {name: torch.tensor(numbers, device=engine.device) for name, numbers in given.items()}
    logits = torch.zeros(len(call.rows), width, engine.contract.vocab_size, device=engine.device)
    rows = cache_rows(engine.contract, cache, call.first_row, len(call.rows))
    if recurrence is None or not engine.contract.recurrent:
        make_step(engine, rows, inputs, {"logits": logits}).run()
    else:
        inputs["pending"] = torch.zeros(len(call.rows), HALF, dtype=torch.int64, device=engine.device)
        step = make_step(engine, rows, inputs, {"logits": logits})
        read = torch.tensor([row.read for row in call.rows], device=engine.device)
        if call.goes_on:
            recurrence.go_on(step, call.first_row).run()
        else:
            recurrence.read(step, call.first_row, read).run()
    for place, row in enumerate(call.rows, call.first_row):
        if row.accepted is not None:
            for name in engine.contract.cache_names:
                entries = cache[name][place, :, row.start - row.tail :]  # [kv_heads, T, D]
                entries[:, : len(row.accepted)] = entries[:, row.accepted]
            for state in engine.contract.of_kind(WINDOW):
                assert recurrence is not None
                start, path = torch.tensor([row.start]), torch.tensor([row.accepted])
                recurrence.straighten(cache[state.name][None], start.to(engine.device), path.to(engine.device), place)
    return logits


def _deep_calls(contract: Contract, token_count: int, window: int | None) -> list[Call]:
    """Put a line and a tree far into a long sequence: at the last positions if that much cache is affordable, and past
    the sliding window in any case."""
    affordable = max(DEEP_CACHE_BYTES // contract.cache_bytes_per_token, (window or 0) + 8)
    start = min(contract.max_length - 3, affordable)
    padding = max(0, start + 5 - contract.max_length)
    random = Random(SEED)
    tokens = [random.randrange(token_count) for _ in range(5)]
    tree, _ = random_tree(random, 5, deepest=2)  # whose last entries lie beyond the last position
    calls = {
        "deep cache": RowCall(tokens, start, padding, line_of(5), []),
        "deep tree": RowCall(tokens, start, 0, tree, []),
    }
    return [Call(scenario, 0, [row]) for scenario, row in calls.items()]


def _deep_logits(model: Any, made: list[Tensor], call: RowCall) -> Tensor:
    found: dict[int, Tensor] = {}
    for path in leaves_of(call.parents[: call.live]):
        logits = continued_logits(model, _shuffled(made, call.start), [call.tokens[node] for node in path])
        found |= zip(path, logits, strict=True)
    return torch.stack([found[node] for node in range(call.live)])


def _shuffled(made: list[Tensor], rows: int) -> Iterator[Tensor]:
    """Give so many rows of each cache buffer, in the contract's order: the same ones whenever they are asked for.

    They are the model's own, since its numbers grow by many times where a cache holds what it would never make.
    """
    generator = torch.Generator().manual_seed(SEED)
    order = torch.randint(2**31, (rows,), generator=generator)
    for buffer in made:
        yield buffer[:, :, order % buffer.shape[2]]


def _cache(contract: Contract, rows: int, capacity: int) -> dict[str, Tensor]:
    """Make buffers full of garbage, which a graph must never read; recurrent states begin as zeros."""

    def buffer(state: State) -> Tensor:
        if state.kind == ROW:
            return torch.zeros(state.memory(rows, capacity))
        if state.kind == WINDOW:
            return torch.full(state.memory(rows, 2 * HALF), torch.nan)
        return torch.full(state.memory(rows, capacity), 1e4)

    return {state.name: buffer(state) for state in contract.kept if state.kind != SOURCE}


def _sources(contract: Contract, sources: list[list[Tensor]]) -> dict[str, Tensor]:
    """Give rows what they find of their sources, behind which there is garbage; nothing where there are none."""
    if not sources:
        return {}
    lengths = [made[0].shape[2] for made in sources]
    longest = max(lengths) + (GARBAGE if SOURCES in contract.capabilities else 0)
    states = {}
    for place, state in enumerate(contract.of_kind(SOURCE)):
        states[state.name] = torch.full(state.memory(len(sources), longest), 1e4)
        for row, made in enumerate(sources):
            states[state.name][row, :, : lengths[row]] = made[place][0]
    return states | {"source_length": torch.tensor(lengths)} if longest > max(lengths) else states


def _cache_holding(contract: Contract, made: list[Tensor], start: int, width: int) -> dict[str, Tensor]:
    cache = _cache(contract, 1, start + width)
    for name, rows in zip(contract.cache_names[-len(made) :], _shuffled(made, start), strict=True):
        heads = cache[name].shape[1]  # transformers may keep them once for each head that shares them
        cache[name][:, :, :start] = rows[:, :: rows.shape[1] // heads]
    return cache
