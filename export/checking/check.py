"""Compare the written graph in ONNX Runtime with the checkpoint in torch, call by call: every export checks itself."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import onnx_ir as ir
import torch
from torch import Tensor

from ...engines import (
    EIGHT_BITS,
    FEATURES,
    FP8,
    ROW,
    SOURCE,
    SOURCES,
    WINDOW,
    Contract,
    EncoderContract,
    Engine,
    EngineError,
    ExportError,
    Recurrence,
    State,
    VisionContract,
    cache_rows,
    make_step,
    open_engine,
    scale_of,
)
from ...engines.bundle import FUSED, GRAPH
from ..passes.spell_fp4 import spell_fp4
from ..passes.unround import unround
from ..passes.widen import widen
from .oracle import Reference
from .quality import apart, engine_logits, measure, overlap
from .scenarios import ROWS, Call, line_of

Written = TypeVar("Written", Contract, EncoderContract, VisionContract)
TOLERANCE = 1e-3
"""Largest allowed error, in standard deviations of the checkpoint's logits. float32 rounding stays below 1e-4 of
them even in deep models with large activations; a wrong weight, mask, window or position moves logits by 1e-1.
Within it the best token is the same wherever it leads by twice as much."""

GARBAGE = 5  # entries after the longest source
HALF = 24  # slots of a row that one of its calls may fill


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


@contextmanager
def unrounded(graph: Path, contract: Contract) -> Iterator[tuple[Path, Contract]]:
    """Give a graph whose cache rounds nothing, itself or a copy, until the block ends."""
    model = ir.load(graph)
    if not unround(model):
        yield graph, contract
        return
    copy = graph.with_name("unrounded_copy.onnx")
    ir.save(model, copy)
    states = (replace(state, dtype="float32") if state.dtype in EIGHT_BITS else state for state in contract.states)
    try:
        yield copy, replace(contract, states=tuple(states))
    finally:
        copy.unlink()


def check_model(
    folder: Path, contract: Contract, reference: Reference, kind: str, fuse: Callable[[Path], dict[str, int]]
) -> tuple[dict[str, Any], Tensor, dict[str, int], str | None]:
    """Check `model.onnx`, then what `fuse` writes beside it, which ONNX Runtime runs in its place from then on.

    Return the worse errors, the logits of the sample as the model will run, what was fused, and why nothing was: what
    fails is removed, since `model.onnx` has passed.
    """
    check, logits = check_graph(folder / GRAPH, contract, reference, kind)
    fused = fuse(folder)
    if not any(fused.values()):
        return check, logits, fused, None
    try:
        found, logits = check_graph(folder / FUSED, contract, reference, kind)
    except (EngineError, ExportError) as error:
        (folder / FUSED).unlink()
        return check, logits, {}, str(error)
    errors = {name: max(error, found["errors"][name]) for name, error in check["errors"].items()}
    return found | {"errors": errors, "worst_error": max(errors.values())}, logits, fused, None


def check_graph(
    graph: Path, contract: Contract, reference: Reference, kind: str = "none"
) -> tuple[dict[str, Any], Tensor]:
    """Run every call and fail if an error exceeds the tolerance; returns the errors, for the manifest.

    The reference of a quantised graph must have the rounded weights. What rounding has cost is measured separately, on
    the sample: its logits `[L, V]` from the graph as it will run are returned, too.
    """
    errors, quantised, wide_copy = Errors(reference.scale), kind != "none", contract.dtype != "float32"
    first = given_sources(contract, reference.sources[:1])
    cost: dict[str, Any] = {}
    runs = "torch" if contract.rounded_to == FP8 else "onnxruntime"
    with in_float32(graph, contract) as (graph, contract), unrounded(graph, contract) as (copy, contract_of_copy):
        engine = open_engine("onnxruntime", copy, contract_of_copy, exact_weights=quantised)
        try:
            cache, recurrence = (
                _cache(engine.contract, ROWS, reference.script.capacity),
                Recurrence(ROWS, HALF, engine.device),
            )
            cache |= given_sources(contract, reference.sources)
            for call in reference.script.calls:
                for row, logits in zip(call.rows, run_call(engine, cache, call, recurrence), strict=True):
                    places = zip(row.branches, row.depths, strict=False)  # of the real ones
                    expected = torch.stack([reference.branches[branch][row.start + depth] for branch, depth in places])
                    errors.compare(call.scenario, logits[: row.real], expected)
            for place, branch in enumerate(reference.script.current if reference.features else ()):
                wanted = reference.features[branch]
                found = cache[FEATURES][place, 0, : len(wanted)]
                errors.compare(FEATURES, found, wanted, float(wanted.std()))
            for call, expected in zip(reference.deep, reference.deep_logits, strict=True):
                [row] = call.rows
                cache = _long_cache(engine.contract, reference, row.start + len(row.tokens)) | first
                errors.compare(call.scenario, run_call(engine, cache, call)[0, : row.real], expected)
            report = errors.report(graph) | {"as_float32_copy": wide_copy}
            if copy != graph:
                engine.close()
                engine = open_engine(runs, graph, contract, exact_weights=quantised)
                found = engine_logits(engine, reference.sample.tokens)
                cost = {"cache": _rounding_cost(found, reference) | _rounding_error(graph, found, reference)}
            if quantised:
                engine.close()
                engine = open_engine(runs, graph, contract)
            sample_logits = engine_logits(engine, reference.sample.tokens, first)
        finally:
            engine.close()
    quality = measure(reference.sample_logits, sample_logits, reference.sample.tokens)
    return report | {"quality": asdict(quality)} | cost, sample_logits


def _rounding_cost(found: Tensor, reference: Reference) -> dict[str, float]:
    """Compare logits of the sample with those over a full cache, by KL and by how often both say one token."""
    divergence = measure(reference.full, found, reference.sample.tokens).divergence
    return {"divergence": divergence, "agreement": overlap(reference.full, found, 0.0)}


def _rounding_error(graph: Path, found: Tensor, reference: Reference) -> dict[str, float]:
    """Return how far logits of the sample are from the checkpoint's over rounded entries, or refuse the graph."""
    error = apart(found, reference.rounded)
    if not error <= reference.rounded_noise:
        raise ExportError(
            f"the {graph.parent.name} graph does not round its cache as its checkpoint's is: on the text logits are "
            f"off by {error:.2g} (root mean square), expected at most {reference.rounded_noise:.2g}; please report it"
        )
    return {"worst_error": error, "tolerance": reference.rounded_noise}


def run_call(engine: Engine, cache: Mapping[str, Tensor], call: Call, recurrence: Recurrence | None = None) -> Tensor:
    """Return the logits of all tokens `[B, S, V]`, and move the entries of those that are accepted into order."""
    width = len(call.rows[0].tokens)
    given = {"input_ids": [row.tokens for row in call.rows], "start": [row.start for row in call.rows]}
    if any(row.parents != line_of(width) for row in call.rows):
        given |= {"depths": [row.positions for row in call.rows], "ancestors": [row.ancestors for row in call.rows]}
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


def _cache(contract: Contract, rows: int, capacity: int) -> dict[str, Tensor]:
    """Make buffers full of garbage, which a graph must never read; recurrent states begin as zeros."""

    def buffer(state: State) -> Tensor:
        if state.kind == ROW:
            return torch.zeros(state.memory(rows, capacity))
        if state.kind == WINDOW:
            return torch.full(state.memory(rows, 2 * HALF), torch.nan)
        largest = EIGHT_BITS.get(state.dtype, 1e4)
        return torch.full(state.memory(rows, capacity), largest).to(getattr(torch, state.dtype))

    return {state.name: buffer(state) for state in contract.kept if state.kind != SOURCE}


def given_sources(contract: Contract, sources: list[list[Tensor]]) -> dict[str, Tensor]:
    """Give rows what they find of their sources, after which there is garbage; nothing where there are none."""
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


def _long_cache(contract: Contract, reference: Reference, capacity: int) -> dict[str, Tensor]:
    cache = _cache(contract, 1, capacity)
    scales = [scale_of(name) for name in cache if scale_of(name) in cache]
    names = [name for name in contract.cache_names if name not in scales]
    for name, made in zip(names[-len(reference.made) :], reference.made, strict=True):
        every = made.shape[1] // cache[name].shape[1]  # transformers may keep them once for each head that shares them
        order = reference.order % made.shape[2]
        cache[name][:, :, : len(order)] = made[:, ::every, order] / reference.factors.get(name, 1.0)
    for name in scales:
        cache[name].fill_(1.0)  # of entries that are not rounded
    return cache
