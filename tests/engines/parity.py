"""Compares an engine with ONNX Runtime over all that a runtime does to a cache: the built-in check's calls."""

from pathlib import Path

import torch
from torch import Tensor
from trt_spec.engines import Bundle, Engine, blank_cache, blank_step, open_engine
from trt_spec.export.scenarios import ROWS, Call, Script, write_script

TOLERANCE = 1e-4
"""In standard deviations of the logits, or as it is where they deviate by less than 1. The tiny families' deviate by 2;
rounding costs each engine up to 1e-4, against the checkpoint in float64, and a wrong operator more than 1e-2."""

GARBAGE = 1e4  # what a cache holds where nothing was written, and nobody may read


def assert_engine_agrees(
    bundle: Path, engine: str = "torch", device: str = "cpu", tolerance: float = TOLERANCE
) -> None:
    """Each model of a float32 bundle has ONNX Runtime's logits."""
    opened = Bundle.open(bundle)
    for role, model in opened.models.items():
        script = write_script(opened.tokenizer.vocab_size, model.contract.max_length)
        oracle = open_engine("onnxruntime", opened.graph(role), model.contract, exact_weights=True)
        expected = run_script(oracle, script)
        found = run_script(open_engine(engine, opened.graph(role), model.contract, device, exact_weights=True), script)
        allowed = tolerance * max(1.0, float(torch.cat(expected).std()))
        for call, ours, theirs in zip(script.calls, found, expected, strict=True):
            error = float((ours - theirs).abs().max().nan_to_num(nan=float("inf")))
            assert error <= allowed, f"{role}, {call.scenario}: a logit is off by {error:.2g}, allowed is {allowed:.2g}"


def run_script(engine: Engine, script: Script) -> list[Tensor]:
    """The logits [live rows, V] of each call."""
    contract = engine.contract
    cache = blank_cache(contract, ROWS, script.capacity, engine.device)
    for name in contract.cache_names:
        cache[name].fill_(GARBAGE)
    logits = [_run(engine, cache, call) for call in script.calls]
    engine.close()
    return logits


def _run(engine: Engine, cache: dict[str, Tensor], call: Call) -> Tensor:
    width = len(call.rows[0].tokens)
    step = blank_step(engine, cache, call.first_row, len(call.rows), width, width)
    step.input_ids.copy_(torch.tensor([row.tokens for row in call.rows]))
    step.start.copy_(torch.tensor([row.start for row in call.rows]))
    step.run()
    return torch.cat([logits[: row.live] for row, logits in zip(call.rows, step.logits, strict=True)]).cpu()
