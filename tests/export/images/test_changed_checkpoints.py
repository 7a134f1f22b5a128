"""Checkpoints that see are exported with images, too, if they are quantised, have an adapter, or keep narrow caches."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig, AutoModelForImageTextToText
from trt_spec.engines import ExportError
from trt_spec.export import export_bundle
from trt_spec.runtime import Decoder, RequestError, SamplingParams

from ...kit.adapters import adapter_of
from ...kit.models import tiny_llama
from ...kit.quantised_models import KINDS, quantise
from ...kit.seeing_models import Seeing

LATER = pytest.mark.exhaustive
MOST = 16
OF_TEXT = r".*(language_model|text_model).*\.(q_proj|down_proj)"


def said_by_bundle(one: Seeing, bundle: Path, **asked: Any) -> list[list[int]]:
    prompts, params = one.prompts()[:3], SamplingParams(max_new_tokens=MOST)
    with Decoder.open(bundle) as decoder:
        asked |= {"images": [own for _, own in prompts], "drafter": "model", "draft_length": 3}
        return [list(one.token_ids) for one in decoder.generate([text for text, _ in prompts], params, **asked)]


def said_by(one: Seeing, whole: Any) -> list[list[int]]:
    other = Seeing(one.kind, whole.eval(), one.path, one.bundle, one.report)
    return [other.said(*prompt, MOST) for prompt in one.prompts()[:3]]


def whole_with(one: Seeing, adapter: Path) -> Any:
    whole = AutoModelForImageTextToText.from_pretrained(one.path, dtype=torch.float32)
    return PeftModel.from_pretrained(whole, adapter).merge_and_unload()


@pytest.mark.parametrize(
    ("kind", "modules"),
    [
        ("llava", ["q_proj", "v_proj"]),
        pytest.param("qwen2_5_vl", ["qkv", "down_proj"], marks=LATER),  # some of the vision tower
        *(pytest.param(kind, OF_TEXT, marks=LATER) for kind in ("qwen2_5_vl", "gemma3", "smolvlm")),
    ],
)
def test_an_adapter_of_a_whole_is_merged_into_all_that_it_changes(
    seeing_of: Callable[[str], Seeing], tmp_path: Path, kind: str, modules: Any
):
    one = seeing_of(kind)
    adapter = adapter_of(
        one.path, tmp_path / "adapter", kind=AutoModelForImageTextToText, target_modules=modules, task_type=None
    )
    expected = said_by(one, whole_with(one, adapter))
    assert expected != said_by(one, one.whole), "the adapter changes the text"
    export_bundle(one.path, tmp_path / "bundle", one.path, lora=adapter, images=True)
    assert said_by_bundle(one, tmp_path / "bundle") == expected


def test_an_adapter_of_another_model_is_refused_instead_of_ignored(llava: Seeing, tmp_path: Path):
    adapter = adapter_of(llava.path, tmp_path / "adapter", kind=AutoModelForImageTextToText, target_modules=["q_proj"])
    text = tiny_llama(tmp_path / "text")
    with pytest.raises(ExportError, match=r"does not fit its base model, which lacks what 10 of its tensors change"):
        export_bundle(text, tmp_path / "bundle", lora=adapter, check=False)
    of_text = adapter_of(text, tmp_path / "of_text", target_modules=["q_proj"])
    with pytest.raises(ExportError, match="names matrices of a model of text alone"):
        export_bundle(llava.path, tmp_path / "bundle", lora=of_text, images=True)


@pytest.mark.parametrize("kind", ["llava", pytest.param("qwen2_5_vl", marks=LATER)])
def test_requests_with_images_bring_adapters_of_their_own(
    seeing_of: Callable[[str], Seeing], tmp_path: Path, kind: str
):
    one = seeing_of(kind)
    adapter = adapter_of(
        one.path, tmp_path / "one", kind=AutoModelForImageTextToText, target_modules=OF_TEXT, task_type=None
    )
    export_bundle(one.path, tmp_path / "bundle", one.path, images=True, adapters=2)
    prompts, params = one.prompts()[:3], SamplingParams(max_new_tokens=MOST)
    with Decoder.open(tmp_path / "bundle", prefix_bytes=1 << 24) as decoder:
        decoder.load_adapter("one", adapter)
        requests = [
            decoder.submit(text, params, images=images, adapter=name, drafter="model", draft_length=3)
            for name in (None, "one")
            for text, images in prompts
        ]
        while decoder.step():
            pass
    found = [list(one.token_ids) for one in requests]
    assert found == said_by(one, one.whole) + said_by(one, whole_with(one, adapter))


def test_an_adapter_of_the_vision_tower_is_refused_for_requests(llava: Seeing, tmp_path: Path):
    adapter = adapter_of(llava.path, tmp_path / "one", kind=AutoModelForImageTextToText, target_modules=["fc1"])
    export_bundle(llava.path, tmp_path / "bundle", images=True, adapters=1, check=False)
    with (
        Decoder.open(tmp_path / "bundle") as decoder,
        pytest.raises(RequestError, match=r"adapts model\.vision_tower\..*\.fc1, which this bundle has no room beside"),
    ):
        decoder.load_adapter("one", adapter)


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("llava", "awq"),
        *(
            pytest.param(kind, method, marks=LATER)
            for kind, methods in {
                "qwen2_5_vl": ("compressed int4", "gptq"),
                "gemma3": ("fp8 blocks", "compressed fp8"),
                "mistral3": ("fp8 tensor",),
            }.items()
            for method in methods
        ),
    ],
)
def test_a_quantised_checkpoint_sees_by_the_numbers_that_it_means(
    seeing_of: Callable[[str], Seeing], tmp_path: Path, kind: str, method: str
):
    one, path = seeing_of(kind), tmp_path / "quantised"
    shutil.copytree(one.path, path)
    config = AutoConfig.from_pretrained(path)
    meant = quantise(KINDS[method], path)
    family = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    whole = family.from_pretrained(None, config=config, state_dict=meant, dtype=torch.float32)
    report = export_bundle(path, tmp_path / "bundle", path, images=True)
    assert report.vision is not None
    assert "target/model.onnx" in report.vision.entry.check
    assert said_by_bundle(one, tmp_path / "bundle") == said_by(one, whole)


@pytest.mark.parametrize(
    "kind", ["llava", pytest.param("qwen2_5_vl", marks=LATER), pytest.param("gemma3", marks=LATER)]
)
def test_a_narrow_cache_keeps_images_as_it_keeps_text(seeing_of: Callable[[str], Seeing], tmp_path: Path, kind: str):
    """Its rounding changes texts; proposals do not."""
    one = seeing_of(kind)
    report = export_bundle(one.path, tmp_path / "bundle", one.path, images=True, cache="int8")
    assert report.vision is not None
    assert report.vision.entry.check["target/model.onnx"]["worst_error"] < 1e-3
    prompts, params = one.prompts()[:3], SamplingParams(max_new_tokens=MOST, logprobs=0)
    with Decoder.open(tmp_path / "bundle") as decoder:
        images = [own for _, own in prompts]
        plain = decoder.generate([text for text, _ in prompts], params, images=images, draft_length=0)
    first = [output.logprobs[0].logprob for output in plain if output.logprobs]
    # Rounding moves LLaVA's by 0.09 without factors of keys and by 0.12 with them, other images by 0.27 and 0.83.
    assert first == [pytest.approx(one.likeliest(*prompt), abs=0.2) for prompt in prompts]
    assert said_by_bundle(one, tmp_path / "bundle") == [list(output.token_ids) for output in plain]
