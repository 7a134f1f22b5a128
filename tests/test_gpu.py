"""What only a GPU can show: a round without a wait, captured rounds with the text of eager ones, engines that agree."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trt_spec.engines import Bundle, open_engine
from trt_spec.export import export_bundle
from trt_spec.export.checking.quality import engine_logits
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.memory import bucket
from trt_spec.runtime.round.round import run_round
from trt_spec.runtime.scheduling import capture

from .engines.parity import assert_engine_agrees
from .kit.adapters import Adapted
from .kit.arbiter import arbiter_of
from .kit.bundles import Pair
from .kit.rounds import COUPLED, GREEDY, LLAMA, SAMPLED, SCENES, TEXTS, Scene, require_same, texts

pytestmark = pytest.mark.gpu

ENGINES = ["torch", "torch-compiled", "onnxruntime"]
SHORT = Scene(LLAMA, [("model", 2)], GREEDY, TEXTS)


@pytest.mark.parametrize("name", SCENES)
def test_captured_rounds_write_on_the_gpu_the_texts_of_the_cpu(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, on models small enough that no two scores come close to a tie; requests outgrow what steps read."""
    monkeypatch.setattr(bucket, "SHORTEST", 16)
    scene = SCENES[name]
    bundle = scene.bundle(request)
    require_same(texts(scene, bundle, "torch", "cuda"), texts(scene, bundle), scene)


@pytest.mark.parametrize("params", [GREEDY, COUPLED, SAMPLED], ids=["greedy", "coupled", "sampled"])
@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_writes_them_captured_and_eager(
    llama: Pair, engine: str, captured: bool, params: SamplingParams
) -> None:
    scene = replace(SHORT, params=params)
    require_same(texts(scene, llama.bundle, engine, "cuda", capture=captured), texts(scene, llama.bundle), scene)


@pytest.mark.parametrize("params", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_texts_of_the_shipped_pair_differ_from_the_cpus_at_near_ties_alone(demo: Pair, params: SamplingParams) -> None:
    """Sums are made in another order there: the certificate's arbiter judges each difference."""
    prompts = [f"def {name}(self, " for name in ("read", "write", "open", "close", "parse", "main")]
    given, params = Bundle.open(demo.bundle), replace(params, max_new_tokens=64)
    with Decoder.open(demo.bundle) as decoder:
        expected = decoder.generate(prompts, params, draft_length=0)
        ids = [tuple(decoder.tokenizer.encode(prompt).ids) for prompt in prompts]
    with Decoder.open(demo.bundle, "torch", "cuda") as decoder:
        found = decoder.generate(prompts, params, draft_length=4)
    engine = open_engine("torch", given.graph("target"), given.target.contract, "cuda")

    def on_the_gpu(context: Sequence[int]) -> Tensor:
        return engine_logits(engine, list(context))[-1].cpu()

    judge = arbiter_of(demo, on_the_gpu)
    for prompt, ours, theirs in zip(ids, found, expected, strict=True):
        difference = judge.judge(prompt, params, ours.token_ids, theirs.token_ids, width=5, batch=len(prompts))
        assert difference is None or difference.near_tie, str(difference)
    engine.close()


@pytest.mark.parametrize("name", ["greedy lines", "coupled trees", "sampled lines", "sampled trees", "tokenwise lines"])
def test_a_round_never_waits_for_the_gpu(llama: Pair, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = []

    def watched(*arguments: Any) -> object:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run_round(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            rounds.append(1)

    monkeypatch.setattr(capture, "run_round", watched)
    texts(SCENES[name], llama.bundle, "torch", "cuda", capture=False)
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
    assert len(eager) == 5, "the first token after the prompt, two rounds as they are, and two records"
    assert output.speculation.rounds > 10
    assert 0 < output.speculation.verify_ms < 1e3 * output.seconds


@pytest.mark.parametrize("engine", ["torch", "onnxruntime"])
def test_logits_on_the_gpu_are_those_on_the_cpu(llama: Pair, engine: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    assert_engine_agrees(llama.bundle, engine, "cuda")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("engine", ENGINES)
def test_half_precision_is_as_close_as_on_the_cpu(llama: Pair, tmp_path: Path, engine: str, dtype: str) -> None:
    """A tiny random model loses 3 to 4 % in bfloat16 whatever computes it: sums in another order lose hardly more."""
    export_bundle(llama.checkpoint, tmp_path / "half", llama.checkpoint, dtype=dtype, check=False)

    def logits(path: Path, name: str, device: str) -> Tensor:
        bundle = Bundle.open(path)
        opened = open_engine(name, bundle.graph("target"), bundle.target.contract, device)
        found = engine_logits(opened, list(range(5, 60))).cpu()
        opened.close()
        return found

    exact = logits(llama.bundle, "onnxruntime", "cpu")
    lost, usual = (
        float((found - exact).norm() / exact.norm())
        for found in (logits(tmp_path / "half", engine, "cuda"), logits(tmp_path / "half", "torch", "cpu"))
    )
    assert lost < 1.5 * usual
    assert all(
        len(one.tokens) == most
        for one, most in zip(texts(SHORT, tmp_path / "half", engine, "cuda"), SHORT.lengths, strict=True)
    )


def test_adapters_say_there_what_they_say_on_the_cpu(adapted: Adapted) -> None:
    """Rows of one batch have different ones; captured rounds with and without them take turns."""
    params = SamplingParams(max_new_tokens=24, temperature=0, ignore_eos=True)

    def said(engine: str, device: str) -> list[tuple[int, ...]]:
        with Decoder.open(adapted.pair.bundle, engine, device, max_batch=4) as decoder:
            for name, folder in adapted.folders.items():
                decoder.load_adapter(name, folder)
            rows = [
                decoder.submit([5, 9, 17, 5, 9], params, draft_length=3, adapter=one)
                for one in (None, None, "wide", "narrow", "wide", None)
            ]
            while decoder.step():
                pass
            return [one.output().token_ids for one in rows]

    assert said("torch", "cuda") == said("onnxruntime", "cpu")
