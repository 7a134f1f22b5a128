"""TensorRT plans of targets that see, and of the graphs that see for them: compiled for RTX."""

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trt_spec.engines import WHOLE_IMAGES, Bundle, ExportError, TensorSpec, VisionContract
from trt_spec.export import export_bundle
from trt_spec.export.plans.build import build_plans
from trt_spec.export.plans.roles import BuildOptions
from trt_spec.export.plans.seeing import LONGEST_TO_SHORTEST, SIZES, ranges_of_images
from trt_spec.export.writing.images import write_image_settings
from trt_spec.runtime.images.families import qwen
from trt_spec.runtime.images.families.qwen import Qwen

from ...kit.seeing_models import Seeing, seeing

RANGES = {
    "llava": {"tiles": (1, 1)},
    "qwen2_5_vl": {"patches": (4, 192)},
    "qwen3_vl": {"patches": (4, 192)},
    "mistral3": {"image_height": (14, 70), "image_width": (14, 70)},
    "idefics3": {"tiles": (1, 26)},
    "smolvlm": {"tiles": (1, 26)},
}


@pytest.mark.plans
@pytest.mark.usefixtures("compiled_here")
@pytest.mark.parametrize("kind", RANGES)
def test_the_plans_of_every_family_compile(tmp_path: Path, kind: str) -> None:
    seeing(kind, tmp_path / "whole")
    export_bundle(tmp_path / "whole", tmp_path / "bundle", images=True, check=False, dtype="float16")
    compiled(kind, tmp_path / "bundle")


@pytest.mark.usefixtures("compiled_here")
def test_a_target_that_sees_and_its_vision_graph_compile_for_images_of_all_sizes(
    seeing_of: Callable[[str], Seeing], tmp_path: Path
) -> None:
    compiled("qwen2_5_vl", shutil.copytree(seeing_of("qwen2_5_vl").bundle, tmp_path / "bundle"))


def compiled(kind: str, path: Path) -> None:
    options = BuildOptions("tensorrt-rtx", ["8.9"], (1, 4), draft_length=0, prefill_width=4, unfused_attention=True)
    report = build_plans(path, options)
    bundle, (_, target, vision) = report.bundle, report.plans
    assert bundle.vision is not None
    assert (vision.key.model, vision.role) == ("vision", "see")
    assert {name: (least, most) for name, least, most in vision.key.ranges} == RANGES[kind]
    assert vision.inputs == [str(spec) for spec in bundle.vision.contract.inputs]
    assert target.inputs == [str(spec) for spec in bundle.target.contract.inputs]
    assert target.key.sizes["entries"] == 4, "one for each token that a call reads"


def test_tokens_of_an_image_that_see_each_other_are_refused_by_name(
    seeing_of: Callable[[str], Seeing], tmp_path: Path
) -> None:
    """As those of Gemma 3 do."""
    path = shutil.copytree(seeing_of("qwen2_5_vl").bundle, tmp_path / "bundle")
    opened = Bundle.read(path)
    contract = replace(opened.target.contract, capabilities=(WHOLE_IMAGES,))
    replace(opened, models=opened.models | {"target": replace(opened.target, contract=contract)}).save()
    with pytest.raises(ExportError) as refused:
        build_plans(path, BuildOptions("tensorrt-rtx", ["8.9"]))
    assert str(refused.value) == (
        f"the target of bundle {path} reads all tokens of an image in one call, for which no plans are "
        "made; use engine onnxruntime or torch, or export without --images"
    )


@pytest.mark.parametrize(
    ("fewest", "most", "patch", "bound_is_enough"),
    [(3136, 12_845_056, 14, True), (784, 100_352, 14, False), (784, 9408, 14, False), (100_352, 100_352, 14, False)],
)
def test_a_plan_has_room_for_every_image_that_is_read(
    fewest: int, most: int, patch: int, bound_is_enough: bool
) -> None:
    """Narrow images, and those that are enlarged to the least size, may have more pixels than the bounds say."""
    assert qwen.LONGEST_TO_SHORTEST == LONGEST_TO_SHORTEST
    settings = {"bounds": (fewest, most), "patch": patch, "merge": 2}
    family = Qwen(scaling=None, frames=2, image_token=0, **settings)  # type: ignore[arg-type]
    shapes = [(7 * 2**one, 7 * 2**one * ratio) for one in range(9) for ratio in range(1, 201)]
    largest = max(math.prod(family._fitting(*shape)) for shape in shapes)
    assert (largest <= most) == bound_is_enough
    assert largest // patch**2 <= SIZES["qwen"](settings)["patches"][1] <= 1.1 * max(largest, most) // patch**2


@pytest.mark.parametrize(
    ("family", "settings", "shape"),
    [
        ("qwen", {"bounds": None, "patch": 14, "merge": 2}, ("patches", 8)),
        ("pixtral", {"most": None, "crop": None, "patch": 28}, (1, 3, "image_height", "image_width")),
    ],
)
def test_images_without_a_bound_are_refused(
    tmp_path: Path, family: str, settings: dict[str, Any], shape: tuple[Any, ...]
) -> None:
    write_image_settings({"family": family, "settings": settings}, tmp_path)
    contract = VisionContract((TensorSpec("pixels", "float32", shape),), 8, "float16", 9)
    with pytest.raises(ExportError, match="reads images of any size, for which no plan can be made; let its processor"):
        ranges_of_images(tmp_path, contract)
