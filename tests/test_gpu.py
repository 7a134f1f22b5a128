"""What only a GPU can show: a round without a wait, captured rounds with the text of eager ones, engines that agree."""

from pathlib import Path
from typing import Any

import pytest
import torch
from trt_spec.engines import Bundle, open_engine
from trt_spec.export import export_bundle
from trt_spec.export.quality import engine_logits
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.memory import bucket
from trt_spec.runtime.round.round import run_round
from trt_spec.runtime.scheduling import capture

from .bundles import DRAFTERS_OF_A_PAIR, Pair
from .engines.parity import assert_engine_agrees

pytestmark = pytest.mark.gpu

PROMPTS = ["def f(", "abc abc abc abc", "x"]
ENGINES = ["torch", "torch-compiled", "onnxruntime"]
SETTINGS = [
    SamplingParams(max_new_tokens=40, temperature=0, ignore_eos=True),
    SamplingParams(max_new_tokens=40, temperature=1.0, seed=3, rule="coupled"),
    SamplingParams(max_new_tokens=40, temperature=1.0, seed=3, top_p=0.9, presence_penalty=0.5, logprobs=2),
    SamplingParams(max_new_tokens=40, temperature=1.0, seed=3, top_p=0.9, logprobs=2),
]
TREES = [("model", "3+4"), ("random", "2+6"), ("model", "3/9"), ("model", "2x2x1")]


def texts(bundle: Path, params: SamplingParams, engine: str, device: str, *, captured: bool = True) -> list[object]:
    with Decoder.open(bundle, engine, device, max_batch=3, capture=captured) as decoder:
        found = []
        for drafter, draft_length in (
            ("none", 0),
            ("model", 2),
            *((drafter, 4) for drafter in DRAFTERS_OF_A_PAIR),
            *TREES,
        ):
            outputs = decoder.generate(PROMPTS, params, draft_length=draft_length, drafter=drafter)
            found += [output.token_ids for output in outputs]
    return found


@pytest.mark.parametrize("params", SETTINGS)
@pytest.mark.parametrize("engine", ENGINES)
def test_text_on_the_gpu_is_that_on_the_cpu(
    llama: Pair, engine: str, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, on models small enough that no two scores come close to a tie; requests outgrow what steps read."""
    monkeypatch.setattr(bucket, "SHORTEST", 16)
    expected = texts(llama.bundle, params, "onnxruntime", "cpu")
    assert texts(llama.bundle, params, engine, "cuda") == expected
    assert texts(llama.bundle, params, engine, "cuda", captured=False) == expected


@pytest.mark.parametrize("params", SETTINGS)
def test_a_round_never_waits_for_the_gpu(llama: Pair, params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = []

    def watched(*arguments: Any) -> object:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run_round(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            rounds.append(1)

    monkeypatch.setattr(capture, "run_round", watched)
    texts(llama.bundle, params, "torch", "cuda", captured=False)
    assert len(rounds) > 10


def test_the_sync_debug_mode_does_notice_a_wait() -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError):
            torch.ones(1, device="cuda").item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_most_rounds_are_replayed_and_their_times_are_those_of_the_gpu(
    llama: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = []
    monkeypatch.setattr(capture, "run_round", lambda *a: eager.append(1) or run_round(*a))
    with Decoder.open(llama.bundle, "torch", "cuda", max_batch=1) as decoder:
        [output] = decoder.generate("def f(", SamplingParams(max_new_tokens=100, ignore_eos=True), draft_length=4)
    assert len(eager) <= 4, "two rounds as they are, and two records"
    assert output.speculation.rounds > 10
    assert 0 < output.speculation.verify_ms < 1e3 * output.seconds


@pytest.mark.parametrize("engine", ["torch", "onnxruntime"])
def test_logits_on_the_gpu_are_those_on_the_cpu(llama: Pair, engine: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    assert_engine_agrees(llama.bundle, engine, "cuda")


@pytest.mark.parametrize(("dtype", "allowed"), [("float16", 5e-3), ("bfloat16", 3e-2)])
@pytest.mark.parametrize("engine", ENGINES)
def test_half_precision_is_close(llama: Pair, tmp_path: Path, engine: str, dtype: str, allowed: float) -> None:
    export_bundle(llama.checkpoint, tmp_path / "half", llama.checkpoint, dtype=dtype, check=False)
    logits = []
    for path, name, device in ((llama.bundle, "onnxruntime", "cpu"), (tmp_path / "half", engine, "cuda")):
        bundle = Bundle.open(path)
        opened = open_engine(name, bundle.graph("target"), bundle.target.contract, device)
        logits.append(engine_logits(opened, list(range(5, 60))).cpu())
        opened.close()
    assert float((logits[1] - logits[0]).norm() / logits[0].norm()) < allowed
    assert all(len(tokens) == 40 for tokens in texts(tmp_path / "half", SETTINGS[0], engine, "cuda"))
