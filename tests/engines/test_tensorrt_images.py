"""Images in the TensorRT engine, on the stand-in that keeps the library's rules."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from trt_spec.engines import EngineError
from trt_spec.runtime import Decoder, Output, SamplingParams

from ..kit.seeing_models import Seeing
from . import fake_tensorrt
from .fake_tensorrt import FakeTensorRT, installed, write_plans


@pytest.fixture
def library() -> Iterator[FakeTensorRT]:
    yield from installed(FakeTensorRT())


def texts(decoder: Decoder, one: Seeing, draft_length: int) -> list[tuple[int, ...]]:
    prompts = one.prompts()[:3]
    outputs: list[Output] = decoder.generate(
        [text for text, _ in prompts],
        SamplingParams(max_new_tokens=12, temperature=0),
        images=[own for _, own in prompts],
        drafter="model",
        draft_length=draft_length,
    )
    return [one.token_ids for one in outputs]


@pytest.fixture(params=["llava", "qwen2_5_vl"])
def one(request: pytest.FixtureRequest, seeing_of: Callable[[str], Seeing]) -> Seeing:
    """Made before the stand-in takes the library's place, under which torch would be imported twice."""
    return seeing_of(request.param)


def test_texts_with_images_are_those_of_onnx_runtime(one: Seeing, library: FakeTensorRT, tmp_path: Path) -> None:
    path = shutil.copytree(one.bundle, tmp_path / "bundle")
    write_plans(path, batch=(1, 3), prefill_width=32)
    with (
        Decoder.open(path, max_batch=3) as decoder,
        Decoder.open(path, engine="tensorrt", max_batch=3, capture=False) as ours,
    ):
        for length in (0, 3):
            assert texts(ours, one, length) == texts(decoder, one, length), length
    seen = [model for model, _, _ in library.runs].count("vision")
    assert seen == 2 * 3, "each image once a time"


@pytest.mark.parametrize("one", ["qwen2_5_vl"], indirect=True)
def test_an_image_of_a_size_that_the_plan_does_not_read_is_refused(
    one: Seeing, library: FakeTensorRT, tmp_path: Path
) -> None:
    path = shutil.copytree(one.bundle, tmp_path / "bundle")
    with patch.object(fake_tensorrt, "ranges_of_images", lambda *_: (("patches", 4, 8),)):
        write_plans(path, batch=(1, 3), prefill_width=32)
    with (
        Decoder.open(path, engine="tensorrt", max_batch=3, capture=False) as decoder,
        pytest.raises(EngineError, match=r"an image has \d+ patches, the plan of vision reads 4 to 8; compile it"),
    ):
        texts(decoder, one, 0)
