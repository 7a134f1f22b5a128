"""Pictures equal those of transformers' processors, and so do the tokens that stand for them."""

import base64
import io
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoImageProcessor
from transformers.image_utils import load_image
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.smolvlm.processing_smolvlm import SmolVLMProcessor
from trt_spec.export.writing.images import image_settings
from trt_spec.runtime.images.picture import Picture

from tests.kit.image_processors import CROPS, PROCESSORS, reader_of, tokenizer, whole_processor, write_processor
from tests.kit.images import TURNED, image_file

SIZES = [(28, 28), (57, 33), (31, 90), (5, 3), (200, 20), (151, 117)]  # narrower ones are in tests of refusals
FILES = {
    "gray": image_file(41, 29, "L"),
    "with alpha": image_file(41, 29, "RGBA"),
    "gray with alpha": image_file(41, 29, "LA"),
    "palette": image_file(41, 29, "P"),
    "palette of a GIF": image_file(41, 29, "P", "GIF"),
    "one bit": image_file(41, 29, "1"),
    "JPEG": image_file(41, 29, "RGB", "JPEG"),
    "JPEG of print": image_file(41, 29, "CMYK", "JPEG"),
    "WebP": image_file(41, 29, "RGB", "WEBP", lossless=True),
    "turned": image_file(41, 29, "RGB", "JPEG", turn=TURNED),
    "turned PNG": image_file(41, 29, "RGBA", "PNG", turn=TURNED),
}


@pytest.fixture(params=PROCESSORS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def theirs(folder: Path, contents: list[bytes], name: str) -> Any:
    """Return what transformers' processor of pixels makes of each file, which it reads by itself."""
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    own = PROCESSORS[name][0]
    more = {"patch_size": own["patch_size"] * own["spatial_merge_size"]} if "spatial_merge_size" in own else {}
    more |= {"do_pan_and_scan": False} if name == "gemma3" else {}
    more |= {"return_row_col_info": True} if "image_seq_len" in own else {}
    images = [load_image("data:image/any;base64," + base64.b64encode(content).decode()) for content in contents]
    return [processor(image, return_tensors="np", **more) for image in images]


def equals(picture: Picture, made: Any) -> None:
    expected = made["pixel_values"]
    expected = expected[0] if expected.ndim == 5 else expected  # of a batch of one
    assert picture.inputs["pixels"].dtype == np.float32
    np.testing.assert_array_equal(picture.inputs["pixels"], expected)
    if "image_grid_thw" in made:
        np.testing.assert_array_equal(picture.inputs["grid"], made["image_grid_thw"][0])
        assert picture.inputs["grid"].dtype == np.int64


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_pixels_of_odd_sizes_are_transformers(name: str, size: tuple[int, int], tmp_path: Path):
    reader, content = reader_of(write_processor(name, tmp_path)), image_file(*size)
    equals(reader.read(content), theirs(tmp_path, [content], name)[0])


def test_pixels_of_every_kind_of_file_are_transformers(name: str, tmp_path: Path):
    reader = reader_of(write_processor(name, tmp_path))
    for content, made in zip(FILES.values(), theirs(tmp_path, [*FILES.values()], name), strict=True):
        equals(reader.read(content), made)


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "mistral3"])
@pytest.mark.parametrize("off", ["do_resize", "do_rescale", "do_normalize"])
def test_what_a_processor_leaves_out_is_left_out(name: str, off: str, tmp_path: Path):
    reader, content = reader_of(write_processor(name, tmp_path, **{off: False})), image_file(56, 28)
    equals(reader.read(content), theirs(tmp_path, [content], name)[0])


def test_an_animated_image_is_its_first_frame(tmp_path: Path):
    frames = [Image.new("RGB", (30, 20), colour) for colour in ("red", "green", "blue")]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    reader = reader_of(write_processor("llava", tmp_path))
    equals(reader.read(file.getvalue()), theirs(tmp_path, [file.getvalue()], "llava")[0])


def their_text(name: str, made: list[Any], prompt: str) -> str:
    """Return a prompt in which each placeholder is replaced as the processor would, without making one."""
    own = PROCESSORS[name][0]
    for each in made:
        if name.startswith("smolvlm"):
            own |= {"fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>"}
            self = SimpleNamespace(image_token="<image>", **own)
            there, place = SmolVLMProcessor.replace_image_token(self, each, 0), "<image>"
        elif name.startswith("qwen"):
            self = SimpleNamespace(image_token="<|image_pad|>", image_processor=SimpleNamespace(merge_size=2))
            there, place = Qwen2_5_VLProcessor.replace_image_token(self, each, 0), "<|image_pad|>"
        else:
            height, width = each["image_sizes"][
                0
            ]  # transformers' PixtralProcessor cannot be imported without torchvision
            patch = own["patch_size"] * own.get("spatial_merge_size", 1)
            there, place = ("[IMG]" * (width // patch) + "[IMG_BREAK]") * (height // patch), "[IMG]"
            there = there.removesuffix("[IMG_BREAK]") + "[IMG_END]"
        prompt = prompt.replace(place, "\0", 1).replace("\0", there.replace(place, "\1"), 1)
    return prompt.replace("\1", place)


@pytest.mark.parametrize("around", ["{} {}", "a\n{}\n\nb{}\n", "{}{}"])
def test_the_prompt_is_transformers(name: str, around: str, tmp_path: Path):
    reader, contents = reader_of(write_processor(name, tmp_path)), [image_file(57, 33), image_file(31, 90)]
    prompt = around.format(reader.placeholder, reader.placeholder)
    pictures = [reader.read(content) for content in contents]
    ids = tokenizer().encode(reader.surrounded(prompt, pictures), add_special_tokens=False).ids
    ours = reader.expand(ids, pictures)
    whole = whole_processor(name, tmp_path)
    if whole is not None:
        images = [load_image("data:image/any;base64," + base64.b64encode(each).decode()) for each in contents]
        asked = {"images_kwargs": CROPS} if name == "gemma3-crops" else {}  # files alone do not make it crop
        expected = whole(images=images, text=prompt, add_special_tokens=False, **asked)["input_ids"]
        expected = expected[0] if isinstance(expected[0], list) else expected
    else:
        text = their_text(name, theirs(tmp_path, contents, name), prompt)
        expected = tokenizer().encode(text, add_special_tokens=False).ids
    assert ours == expected


@pytest.mark.parametrize("name", ["llava", "gemma3", "idefics3"])
def test_settings_are_the_same_from_files_as_transformers_writes_them_now(name: str, tmp_path: Path):
    published, saved = tmp_path / "published", tmp_path / "saved"
    published.mkdir()
    whole_processor(name, write_processor(name, published)).save_pretrained(saved)
    assert not (saved / "preprocessor_config.json").exists(), "all is in processor_config.json"
    kept = [image_settings(SimpleNamespace(name="checkpoint", path=path), tokenizer()) for path in (published, saved)]
    assert kept[0] == kept[1]


def test_image_tokens_are_as_many_as_the_grid_says(name: str, tmp_path: Path):
    reader = reader_of(write_processor(name, tmp_path))
    for content in chain(FILES.values(), (image_file(*size) for size in SIZES)):
        picture = reader.read(content)
        soft = max(set(picture.tokens), key=picture.tokens.count)
        assert picture.tokens.count(soft) == np.prod(picture.grid)


def test_pictures_have_a_name_by_all_that_is_read(tmp_path: Path):
    reader = reader_of(write_processor("qwen2_5_vl", tmp_path))
    digests = [reader.read(image_file(40, 30, mode)).digest for mode in ("RGB", "L", "RGB")]
    assert digests[0] == digests[2] != digests[1]
