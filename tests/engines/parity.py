"""Compares an engine with ONNX Runtime over all that a runtime does to a cache: the built-in check's calls."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor
from trt_spec.engines import SOURCE, SOURCES, TAILS, WINDOW, Bundle, Engine, Recurrence, blank_cache, open_engine
from trt_spec.engines.openvino import OpenVinoEngine, sizes
from trt_spec.engines.torch import engine as torch_engine
from trt_spec.export.checking.check import HALF, run_call
from trt_spec.export.checking.scenarios import ROWS, TAIL, TREE, Script, write_script

TOLERANCE = 1e-4
"""In standard deviations of the logits, or as it is where they deviate by less than 1. The tiny families' deviate by 2;
rounding costs each engine up to 1e-4, against the checkpoint in float64, and a wrong operator more than 1e-2."""

GARBAGE = 1e4  # what a cache holds where nothing was written, and nobody may read


def assert_engine_agrees(
    bundle: Path,
    engine: str = "torch",
    device: str = "cpu",
    tolerance: float = TOLERANCE,
    write: Callable[[int, int, bool, bool], Script] = write_script,
    fixes_sizes: bool = True,
) -> None:
    """Each model of a float32 bundle has ONNX Runtime's logits, of trees too if the engine takes them.

    In OpenVINO it has the same bits once it has models for one number of tokens each, or finds that it may have none.
    """
    opened = Bundle.open(bundle)
    for role, model in opened.models.items():
        contract = model.contract
        tails = TAILS in contract.capabilities
        script = write(opened.tokenizer.vocab_size, contract.max_length, contract.recurrent, tails)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch_engine, "WITH_KERNELS", ("cpu", "cuda"))  # operators are fused as on a GPU
            ours = open_engine(engine, opened.graph(role), model.contract, device, exact_weights=True)
        if not ours.takes_trees:
            script.calls = [call for call in script.calls if call.scenario not in (TREE, TAIL)]
        oracle = open_engine("onnxruntime", opened.graph(role), model.contract, exact_weights=True)
        expected, found = run_script(oracle, script), run_script(ours, script)
        allowed = tolerance * max(1.0, float(torch.cat(expected).std()))
        for call, own, theirs in zip(script.calls, found, expected, strict=True):
            error = float((own - theirs).abs().max().nan_to_num(nan=float("inf")))
            assert error <= allowed, f"{role}, {call.scenario}: a logit is off by {error:.2g}, allowed is {allowed:.2g}"
        if isinstance(ours, OpenVinoEngine):
            settled = run_settled(ours, script)
            torch.testing.assert_close(settled, found, rtol=0, atol=0 if model.weights == "none" else allowed)
            if torch.cpu._is_vnni_supported():  # others were not seen
                assert bool(ours.fixed.sizes) == fixes_sizes
        ours.close()
        oracle.close()


def run_settled(engine: OpenVinoEngine, script: Script) -> list[Tensor]:
    """Run it in models for one number of tokens each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizes, "SOME_CALLS", 1)
        engine.settle()
    assert engine.fixed.sizes
    return run_script(engine, script)


def write_trees(vocab: int, max_length: int, recurrent: bool = False, tails: bool = False) -> Script:
    """One tree after the other, alone and beside others."""
    script = Script(vocab, max_length, Random(1), recurrent=recurrent)
    script.call("prefill", 0, 12, [12])
    script.call("prefill", 1, 9, [9, 4, 1])
    for _ in range(4):
        script.tree(TREE, 0, 9, [9])
        script.tree(TREE, 1, 7, [7, 5, 6])
    return script


def run_script(engine: Engine, script: Script) -> list[Tensor]:
    """The logits [live rows, V] of each call."""
    contract = engine.contract
    cache, recurrence = (
        blank_cache(contract, ROWS, script.capacity, engine.device),
        Recurrence(ROWS, HALF, engine.device),
    )
    for name in contract.cache_names:
        cache[name].fill_(GARBAGE)
    for number, state in enumerate(contract.of_kind(SOURCE)):
        shape, generator = cache[state.name].shape, torch.Generator().manual_seed(number)
        cache[state.name] = torch.randn(shape, generator=generator).to(engine.device)
    if SOURCES in contract.capabilities:
        cache["source_length"] = torch.arange(1, ROWS + 1, device=engine.device)
    for state in contract.of_kind(WINDOW):
        cache[state.name] = torch.full(state.memory(ROWS, 2 * HALF), torch.nan, device=engine.device)
    logits = []
    for call in script.calls:
        found = run_call(engine, cache, call, recurrence).cpu()
        logits.append(torch.cat([own[: row.real] for row, own in zip(call.rows, found, strict=True)]))
    return logits
