"""A target that sees is compared with its whole checkpoint, and nothing that reads images otherwise passes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import ViTConfig
from trt_spec.engines import IMAGES, Bundle, ExportError, open_engine
from trt_spec.engines.bundle import VISION
from trt_spec.engines.contract import AXES, IMAGE, WHOLE_IMAGES
from trt_spec.export import export_bundle
from trt_spec.export.checkpoints.checkpoint import load_model, open_checkpoint
from trt_spec.export.seeing import traced
from trt_spec.export.seeing.check_vision import check_seeing, check_vision, entries_of, seen_by
from trt_spec.export.seeing.families import FAMILIES, family_of, seeing_contract, vision_contract
from trt_spec.export.seeing.pixtral import LlavaPixtral
from trt_spec.export.seeing.qwen import Qwen3, Qwen25
from trt_spec.export.tracing.cache import Places
from trt_spec.export.writing.graph import build_graph, write_graph

from ...kit.models import tiny_llama
from ...kit.seeing_models import Seeing, seeing

CLOSE = 1e-4  # standard deviations
FIRST, LATER = ("llava", "gemma3", "qwen2_5_vl"), pytest.mark.exhaustive


@pytest.mark.parametrize("kind", [kind if kind in FIRST else pytest.param(kind, marks=LATER) for kind in FAMILIES])
def test_an_export_checks_its_vision_graph_and_its_target_on_an_image(seeing_of: Callable[[str], Seeing], kind: str):
    one = seeing_of(kind)
    assert one.report.vision is not None
    check = one.report.vision.entry.check
    assert check["worst_error"] < CLOSE
    assert check["target/model.onnx"]["worst_error"] < CLOSE * check["target/model.onnx"]["logit_std"]
    bundle = Bundle.open(one.bundle)
    assert bundle.vision == one.report.vision.entry
    assert [str(state) for state in bundle.target.contract.of_kind(IMAGE)] == [
        f"images float32[{bundle.target.contract.image_size}] per image"
    ]
    own = {"gemma3": WHOLE_IMAGES, "qwen2_5_vl": AXES, "qwen3_vl": AXES}.get(kind)
    assert set(bundle.target.contract.capabilities) & {AXES, WHOLE_IMAGES} == {own} - {None}


@pytest.mark.parametrize("kind", [kind if kind in FIRST else pytest.param(kind, marks=LATER) for kind in FAMILIES])
def test_a_vision_graph_gives_the_same_entries_in_torch(seeing_of: Callable[[str], Seeing], kind: str):
    bundle, family = Bundle.open(seeing_of(kind).bundle), FAMILIES[kind]
    assert bundle.vision is not None
    example = family.example(seeing_of(kind).whole.config)
    expected = entries_of(seeing_of(kind).whole.model.get_image_features(**example)).detach()
    found = torch.zeros_like(expected)
    engine = open_engine("torch", bundle.graph(VISION), bundle.vision.contract)
    engine.step(family.of_whole(example), {IMAGES: found}).run()
    torch.testing.assert_close(found, expected, rtol=0, atol=CLOSE * float(expected.std()))


def _target_checked(kind: str, folder: Path, whole: Any) -> None:
    """Export a target alone, and check it on an image."""
    checkpoint = open_checkpoint(folder)
    model = load_model(checkpoint, "float32")
    contract = seeing_contract(whole.config, checkpoint.shape.contract(256, "float32"))
    seen = seen_by(whole, contract.vocab_size)
    graph, _ = build_graph(model, contract, 256)
    write_graph(graph, folder / "target")
    check_seeing(folder / "target" / "model.onnx", contract, seen)


def _embedding_scaled(model: Any, images: torch.Tensor, vocab_size: int) -> Any:
    return ENTRIES(model, images * 1.1, vocab_size)


def _without_later_layers(model: Any, images: torch.Tensor, vocab_size: int) -> Any:
    return ENTRIES(model, images[:, : model.config.hidden_size], vocab_size)


ENTRIES = traced.entries_among_tokens


@pytest.mark.parametrize(
    ("kind", "name", "fault"),
    [
        ("gemma3", "BothWays", Places),
        ("gemma3", "entries_among_tokens", _embedding_scaled),
        ("qwen2_5_vl", "axes_of", lambda angles, turns: torch.zeros(angles, dtype=torch.int64)),
        ("qwen3_vl", "axes_of", lambda angles, turns: torch.tensor([0, 1, 2, 2])),  # sections side by side
        ("qwen3_vl", "entries_among_tokens", _without_later_layers),
    ],
)
def test_a_target_that_reads_images_otherwise_is_refused(tmp_path: Path, kind: str, name: str, fault: Any):
    whole = seeing(kind, tmp_path)
    with (
        patch.object(traced, name, fault),
        pytest.raises(ExportError, match=r"the target graph does not compute .* in the scenario 'images' a logit"),
    ):
        _target_checked(kind, tmp_path, whole)


def _turned(self: Any, patches: int, grid: torch.Tensor) -> Any:
    places, windows = PLACES(self, patches, grid)
    return places.flip(1), windows


def _one_window(self: Any, patches: int, grid: torch.Tensor) -> Any:
    places, windows = PLACES(self, patches, grid)
    return places, windows * 0


def _upside_down(self: Any, pixels: torch.Tensor) -> Any:
    return PATCHES(self, pixels.flip(2))


PLACES, PATCHES = Qwen25.places, LlavaPixtral.patches


@pytest.mark.parametrize(
    ("kind", "tower", "name", "fault"),
    [
        ("qwen2_5_vl", Qwen25, "places", _turned),
        ("qwen2_5_vl", Qwen25, "places", _one_window),
        ("qwen3_vl", Qwen3, "learned", lambda self, places, grid: torch.zeros(1)),
        pytest.param("llava-pixtral", LlavaPixtral, "patches", _upside_down, marks=LATER),
    ],
)
def test_a_vision_graph_that_sees_otherwise_is_refused(tmp_path: Path, kind: str, tower: Any, name: str, fault: Any):
    whole = seeing(kind, tmp_path)
    text = seeing_contract(whole.config, open_checkpoint(tmp_path).shape.contract(256, "float32"))
    contract, seen = vision_contract(whole.config, text), seen_by(whole, text.vocab_size)
    with patch.object(tower, name, fault):
        graph, _ = build_graph(family_of(whole.config).tower(whole), contract, 0)
    write_graph(graph, tmp_path / "vision")
    with pytest.raises(ExportError, match="the vision graph does not compute"):
        check_vision(tmp_path / "vision" / "model.onnx", contract, seen, False)


def test_a_llava_over_pixtral_that_would_lose_a_patch_is_refused(tmp_path: Path):
    whole = seeing("llava-pixtral", tmp_path)
    whole.config.vision_feature_select_strategy = "default"
    with pytest.raises(
        ExportError, match=r"has vision_feature_select_strategy 'default', by which .*, expected 'full'"
    ):
        family_of(whole.config).tower(whole)


def test_what_cannot_see_is_refused_by_name_before_any_weight_is_read(
    tmp_path: Path, seeing_of: Callable[[str], Seeing]
):
    llama = tiny_llama(tmp_path / "llama")
    with pytest.raises(ExportError, match=r"has the model type 'llama', whose images cannot be exported; those of"):
        export_bundle(llama, tmp_path / "bundle", images=True)
    one = seeing_of("llava")
    other = tmp_path / "other"
    shutil.copytree(one.path, other)
    config = json.loads((other / "config.json").read_text())
    config["vision_config"] = ViTConfig().to_dict()
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ExportError, match=r"sees by a vision tower of the type 'vit', expected clip_vision_model or"):
        export_bundle(other, tmp_path / "bundle", images=True)
    assert not (tmp_path / "bundle").exists()
