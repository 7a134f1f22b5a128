"""Adapters in the TensorRT engine, on the stand-in that keeps the library's rules."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from trt_spec.engines import WHOLE_IMAGES, Contract, EngineError
from trt_spec.engines.tensorrt import CompiledPlan, PlanKey, open_engines
from trt_spec.engines.tensorrt.choice import one_of_each
from trt_spec.runtime import Decoder, SamplingParams

from ..kit.adapters import Adapted
from .fake_tensorrt import FakeTensorRT, installed, write_plans

PROMPTS = ["def f(", "abc abc abc", "x", "def f("]
OF_ROWS = ["wide", None, "narrow", "narrow"]
RULES = {
    "greedy": SamplingParams(max_new_tokens=16, temperature=0, ignore_eos=True),
    "rejection": SamplingParams(max_new_tokens=16, temperature=1, seed=2, ignore_eos=True),
}


@pytest.fixture
def planned(adapted: Adapted, tmp_path: Path) -> Path:
    """A bundle with room for three adapters, and plans for batches of up to 4, with and without them."""
    path = shutil.copytree(adapted.pair.bundle, tmp_path / "bundle")
    write_plans(path, batch=(1, 4))
    return path


@pytest.fixture
def library() -> Iterator[FakeTensorRT]:
    yield from installed(FakeTensorRT())


def texts(decoder: Decoder, rule: str, length: object, rows: list[str | None] = OF_ROWS) -> list[tuple[int, ...]]:
    asked = [
        decoder.submit(prompt, RULES[rule], draft_length=length, adapter=adapter)
        for prompt, adapter in zip(PROMPTS, rows, strict=True)
    ]
    while decoder.step():
        pass
    return [one.output().token_ids for one in asked]


def load(decoder: Decoder, adapted: Adapted) -> None:
    for name, folder in adapted.folders.items():
        decoder.load_adapter(name, folder)


@pytest.mark.parametrize("rule", RULES)
def test_rows_with_adapters_of_their_own_say_what_they_say_in_onnx_runtime(
    planned: Path, adapted: Adapted, library: FakeTensorRT, rule: str
) -> None:
    with (
        Decoder.open(planned, max_batch=4) as decoder,
        Decoder.open(planned, engine="tensorrt", max_batch=4, capture=False) as ours,
    ):
        load(decoder, adapted)
        load(ours, adapted)
        for length in (0, 3, 2 if rule == "rejection" else "2+1"):
            assert texts(ours, rule, length) == texts(decoder, rule, length), length
        contexts = library.calls["create_execution_context"]
        texts(ours, rule, 3)
        assert library.calls["create_execution_context"] == contexts, "made once for each plan, batch and columns"
        assert len(set(library.columns)) > 1, "as many columns as the adapters of a call need"


def test_plans_with_room_for_adapters_are_opened_for_the_first_one_and_run_for_rows_with_one_alone(
    planned: Path, adapted: Adapted, library: FakeTensorRT
) -> None:
    with Decoder.open(planned, engine="tensorrt", max_batch=4, capture=False) as decoder:
        plain = library.calls["deserialize_cuda_engine"]
        load(decoder, adapted)
        assert library.calls["deserialize_cuda_engine"] == plain + 2, "of the target, to verify and to read"
        texts(decoder, "greedy", 3, [None] * 4)
        assert set(library.columns) == {0}
        texts(decoder, "greedy", 3)
        assert set(library.columns) > {0}


def test_without_plans_for_them_adapters_are_refused_with_the_command_that_compiles_these(
    planned: Path, adapted: Adapted, library: FakeTensorRT
) -> None:
    remove(planned, lambda key: bool(key["ranges"]))
    with Decoder.open(planned, engine="tensorrt", max_batch=4, capture=False) as decoder:
        with pytest.raises(EngineError) as refused:
            load(decoder, adapted)
        assert str(refused.value) == (
            f"bundle {planned} has no plans for its target with adapters; compile them: "
            f"trt-spec build --bundle {planned} --engine tensorrt-rtx --compute-capability 8.9"
        )
        assert not decoder.adapters
        assert texts(decoder, "greedy", 3, [None] * 4)


def test_plans_with_room_for_adapters_that_run_less_than_those_without_are_refused(
    planned: Path, adapted: Adapted, library: FakeTensorRT
) -> None:
    remove(planned, lambda key: bool(key["ranges"]) and key["width"] == 8)
    with (
        Decoder.open(planned, engine="tensorrt", max_batch=4, capture=False) as decoder,
        pytest.raises(EngineError, match="with adapters run no 8 tokens at batch 1, those without do; compile both"),
    ):
        load(decoder, adapted)


def remove(bundle: Path, which: object) -> None:
    assert callable(which)
    for sidecar in list(bundle.rglob("plans/*/*.json")):
        if which(json.loads(sidecar.read_text())["key"]):
            sidecar.with_suffix(".plan").unlink()
            sidecar.unlink()


def test_of_plans_for_the_same_steps_the_one_with_the_most_room_is_opened() -> None:
    """A folder of plans may be carried to an export that has more room, whose graph is the same."""

    def plan(columns: int) -> CompiledPlan:
        key = PlanKey("target", "", "tensorrt-rtx", "1", "8.9", 4, 4, (1, 4), 64, ranges=(("columns", 8, columns),))
        return CompiledPlan(key, "verify", 1, "", 0.0, {}, [], [], {})

    narrow, wide = plan(16), plan(32)
    assert one_of_each([narrow, wide]) == one_of_each([wide, narrow]) == [wide]
    assert wide.key.covers(narrow.key)
    assert not narrow.key.covers(wide.key)


def test_a_target_whose_images_are_read_whole_is_refused_before_plans_are_sought() -> None:
    contract = Contract(1, 1, (), vocab_size=8, max_length=64, dtype="float32", capabilities=(WHOLE_IMAGES,))
    with pytest.raises(EngineError, match="for which no plans are made; use engine onnxruntime or torch"):
        open_engines("tensorrt", [(Path("target/model.onnx"), contract)], "cuda", exact_weights=False, alone=True)
