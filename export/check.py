"""The built-in check: the written graph in ONNX Runtime against the checkpoint in torch, call by call."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from ..engines import Contract, ExportError, open_engine
from .oracle import branch_logits, continued_logits
from .passes.widen import widen
from .scenarios import ROWS, Call, RowCall, Script, write_script

TOLERANCE = 1e-3
"""Largest allowed error, in standard deviations of the checkpoint's logits. float32 rounding stays below 1e-4 of
them even in deep models with large activations; a wrong weight, mask, window or position moves logits by 1e-1."""

DEEP_CACHE_BYTES = 128 << 20
SEED = 0


@dataclass(frozen=True)
class Reference:
    """What the checkpoint says: made before the graph is opened, so that the two need not be in memory together."""

    script: Script
    branches: list[Tensor]  # [length, V] of each branch
    deep: RowCall  # continues a cache of random rows
    deep_logits: Tensor  # [live, V]

    @property
    def scale(self) -> float:
        return float(torch.cat(self.branches).std())


@dataclass
class Errors:
    """The worst absolute error of each scenario, and the calls whose best token differs."""

    by_scenario: dict[str, float] = field(default_factory=dict)
    flipped: list[str] = field(default_factory=list)

    def add(self, scenario: str, found: Tensor, expected: Tensor, allowed: float) -> None:
        error = float((found - expected).abs().max().nan_to_num(nan=float("inf")))
        self.by_scenario[scenario] = max(error, self.by_scenario.get(scenario, 0.0))
        best, runner_up = expected.topk(2).values.unbind(-1)
        decided = best - runner_up > 2 * allowed  # nearer ties may fall either way within the tolerance
        if bool((decided & (found.argmax(-1) != expected.argmax(-1))).any()):
            self.flipped.append(scenario)


def make_reference(model: Any, contract: Contract, token_count: int, window: int | None) -> Reference:
    script = write_script(token_count, contract.max_length, window)
    deep = _deep_call(contract, token_count, window)
    keys, values = _random_rows(contract, deep.start)
    return Reference(
        script=script,
        branches=branch_logits(model, script.branches),
        deep=deep,
        deep_logits=continued_logits(model, keys, values, deep.tokens[: deep.live]),
    )


def check_graph(graph: Path, contract: Contract, reference: Reference) -> dict[str, Any]:
    """Run every call; past the tolerance the export fails, else the errors are returned for the bundle."""
    wide_copy = contract.dtype != "float32"
    if wide_copy:
        graph = _write_wide_copy(graph)
        contract = replace(contract, dtype="float32")
    errors = Errors()
    allowed = TOLERANCE * reference.scale
    engine = open_engine("onnxruntime", graph, contract)
    try:
        engine.bind(_cache(contract, ROWS, reference.script.capacity))
        for call in reference.script.calls:
            found = _run(engine, call)
            for row, logits in zip(call.rows, found, strict=True):
                expected = reference.branches[row.branch][row.start : row.start + row.live]
                errors.add(call.scenario, logits[: row.live], expected, allowed)
        deep = reference.deep
        engine.bind(_cache_holding(contract, deep.start, len(deep.tokens)))
        found = _run(engine, Call("deep cache", 0, [deep]))
        errors.add("deep cache", found[0][: deep.live], reference.deep_logits, allowed)
    finally:
        engine.close()
        if wide_copy:
            graph.unlink()
    return _verdict(graph, errors, reference.scale, wide_copy)


def _verdict(graph: Path, errors: Errors, scale: float, wide_copy: bool) -> dict[str, Any]:
    scenario, worst = max(errors.by_scenario.items(), key=lambda item: item[1])
    if not worst <= TOLERANCE * scale:
        raise ExportError(
            f"the {graph.parent.name} graph does not compute what its checkpoint computes: in the scenario "
            f"{scenario!r} a logit is off by {worst:.2g}, expected at most {TOLERANCE * scale:.2g} ({TOLERANCE} of "
            "their standard deviation); please report it"
        )
    if errors.flipped:
        raise ExportError(
            f"the {graph.parent.name} graph chooses another token than its checkpoint in the scenario "
            f"{errors.flipped[0]!r}, though all logits agree within {worst:.2g}; please report it"
        )
    return {
        "worst_error": worst,
        "logit_std": scale,
        "tolerance": TOLERANCE * scale,
        "errors": errors.by_scenario,
        "as_float32_copy": wide_copy,
    }


def _run(engine: Any, call: Call) -> Tensor:
    width = len(call.rows[0].tokens)
    step = engine.step(call.first_row, len(call.rows), width, width)
    step.input_ids.copy_(torch.tensor([row.tokens for row in call.rows]))
    step.start.copy_(torch.tensor([row.start for row in call.rows]))
    step.run()
    logits: Tensor = step.logits
    return logits


def _deep_call(contract: Contract, token_count: int, window: int | None) -> RowCall:
    """Five tokens far into a long sequence: at the last position if that much cache is affordable, past the
    sliding window in any case."""
    affordable = max(DEEP_CACHE_BYTES // contract.cache_bytes_per_token, (window or 0) + 8)
    start = min(contract.max_length - 3, affordable)
    padding = max(0, start + 5 - contract.max_length)
    tokens = torch.randint(token_count, (5,), generator=torch.Generator().manual_seed(SEED))
    return RowCall(tokens.tolist(), start, padding, branch=-1)


def _random_rows(contract: Contract, rows: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(SEED)
    shape = (1, contract.kv_heads, rows, contract.head_dim)
    both = [torch.randn(shape, generator=generator) for _ in contract.cache_names]
    return both[0::2], both[1::2]


def _cache(contract: Contract, rows: int, capacity: int) -> dict[str, Tensor]:
    """Buffers full of garbage: what a graph must never read."""
    shape = (rows, contract.kv_heads, capacity, contract.head_dim)
    return {name: torch.full(shape, 1e4) for name in contract.cache_names}


def _cache_holding(contract: Contract, start: int, width: int) -> dict[str, Tensor]:
    cache = _cache(contract, 1, start + width)
    keys, values = _random_rows(contract, start)
    for layer, (key, value) in enumerate(zip(keys, values, strict=True)):
        cache[f"key_{layer}"][:, :, :start] = key
        cache[f"value_{layer}"][:, :, :start] = value
    return cache


def _write_wide_copy(graph: Path) -> Path:
    """The same weights file computed in float32, for a graph whose kernels the CPU lacks."""
    model = ir.load(graph)
    widen(model)
    copy = graph.with_name("float32_copy.onnx")
    ir.save(model, copy)
    return copy
