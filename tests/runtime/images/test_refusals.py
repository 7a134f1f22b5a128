"""What is no image, or more than an image may be, is refused in a sentence, before it takes memory."""

import io
import struct
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from trt_spec.engines import BundleError, ExportError, RequestError
from trt_spec.export.writing.images import image_settings, write_image_settings
from trt_spec.runtime.images.opening import MOST_BYTES, MOST_IMAGES, open_image
from trt_spec.runtime.images.reader import SETTINGS, ImageReader

from ...kit.image_processors import tokenizer, write_processor
from ...kit.images import image_file


def reader_of(name: str, folder: Path) -> ImageReader:
    kept = image_settings(SimpleNamespace(name="checkpoint", path=write_processor(name, folder)), tokenizer())
    write_image_settings(kept, folder)
    return ImageReader.open(folder)


def huge(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it has so many pixels, all black."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


def saved(kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (20, 20)).save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "an image has 0 bytes, expected 1 to 20,971,520"),
        (b"x" * (MOST_BYTES + 1), "an image has 20,971,521 bytes, expected 1 to 20,971,520"),
        (b"no image", "an image cannot be read (it has no format that is known here); expected"),
        (image_file(90, 90)[:400], "expected a whole file of PNG, JPEG, WEBP, GIF"),
        (image_file(90, 90, kind="JPEG")[:2000], "an image cannot be read (image file is truncated"),
        (huge(8_001, 8_000), "an image has 8,001 x 8,000 pixels, expected at most 64,000,000 in all; make it smaller"),
        (huge(10_000, 10_000), "an image has 10,000 x 10,000 pixels"),
        (huge(100_000, 100_000), "could be decompression bomb"),
        *((saved(kind), "an image cannot be read (") for kind in ("BMP", "TIFF", "PPM", "ICO", "TGA", "EPS", "PDF")),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value[:40],
)
@pytest.mark.filterwarnings("ignore:Image size:PIL.Image.DecompressionBombWarning")
def test_a_file_that_is_no_image_or_too_large_is_refused(content: bytes, said: str):
    with pytest.raises(RequestError) as refused:
        open_image(content)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert refused.value.field == "images"


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("llava", (1, 90_000), "1 x 90,000 pixels would be read at 28 x 2,520,000, expected 1 to 64,000,000 pixels"),
        ("qwen2_5_vl", (1, 201), "1 x 201 pixels, expected a side to be at most 200 times the other; crop it"),
        ("mistral3", (1, 900), "1 x 900 pixels would be read at 0 x 70, expected 1 to 64,000,000 pixels in all"),
    ],
)
def test_an_image_that_is_too_narrow_to_be_read_is_refused(name: str, size: tuple[int, int], said: str, tmp_path: Path):
    with pytest.raises(RequestError) as refused:
        reader_of(name, tmp_path).read(image_file(*size))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("name", "settings", "size", "said"),
    [
        ("llava", {"square": True}, (90_000, 2), "would be read at 90,000 x 90,000, expected 1 to 64,000,000 pixels"),
        ("qwen2_5_vl", {"bounds": None}, (33, 31), "33 x 31 pixels cannot be read as this model reads images"),
        ("mistral3", {"most": None}, (90, 5), "90 x 5 pixels cannot be read as this model reads images (it is smaller"),
    ],
)
def test_an_image_is_refused_before_memory_is_taken_for_what_settings_make_of_it(
    name: str, settings: dict, size: tuple[int, int], said: str, tmp_path: Path
):
    reader = reader_of(name, tmp_path)
    reader._family = replace(reader._family, **settings)
    with pytest.raises(RequestError) as refused:
        reader.read(image_file(*size))
    assert said in str(refused.value)


def test_there_are_as_many_places_as_images_and_not_too_many(tmp_path: Path):
    reader = reader_of("llava", tmp_path)
    picture = reader.read(image_file(9, 9))
    place = reader.image_token
    assert reader.expand([5, place, 6], [picture]) == [5, *picture.tokens, 6]
    for ids in ([5], [place, 5, place]):
        with pytest.raises(RequestError, match=r"the prompt has . places? for 1 image; write <image> once for each"):
            reader.expand(ids, [picture])
    with pytest.raises(RequestError, match="there are 33 images, expected at most 32"):
        reader.expand([place] * (MOST_IMAGES + 1), [picture] * (MOST_IMAGES + 1))


def test_pillow_is_asked_for_where_it_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    reader, content = reader_of("llava", tmp_path), image_file(9, 9)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(RequestError, match=r"to read images needs Pillow; pip install 'trt-spec\[images\]'"):
        reader.read(content)


def test_settings_that_are_damaged_are_refused(tmp_path: Path):
    for damage in ("{", "[]", '{"family": "owls"}', '{"family": "llava", "settings": {"scaling": {}}}'):
        (tmp_path / SETTINGS).write_text(damage)
        with pytest.raises(BundleError, match=r"does not say how to read images .*; export the bundle again"):
            ImageReader.open(tmp_path)


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        (
            "gemma3",
            {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 0},
            "has pan_and_scan_min_crop_size 0, expected more than 0; this version reads no other",
        ),
        ("llava", {"size": {"longest_edge": 5, "shortest_edge": 3}}, "expected shortest_edge, or height and width"),
        ("llava", {"do_pad": True}, "has do_pad True, expected false"),
        (
            "llava",
            {"image_processor_type": "ViTImageProcessor"},
            "reads images by ViTImageProcessor, expected CLIP",
        ),
        (
            "llava",
            {"image_processor_type": "OwnImageProcessor"},
            "the image processor of checkpoint checkpoint",
        ),
    ],
)
def test_processors_that_are_not_known_are_refused_by_export(
    name: str, changed: dict[str, Any], said: str, tmp_path: Path
):
    path = write_processor(name, tmp_path, **changed)
    with pytest.raises(ExportError) as refused:
        image_settings(SimpleNamespace(name="checkpoint", path=path), tokenizer())
    assert said in str(refused.value)


def test_a_processor_of_another_name_is_refused_by_export(tmp_path: Path):
    write_processor("llava", tmp_path)
    for content, said in (
        (
            '{"processor_class": "OwlProcessor"}',
            "reads images by OwlProcessor, expected LlavaProcessor",
        ),
        ("{}", "reads images by a processor of no name"),
    ):
        (tmp_path / "processor_config.json").write_text(content)
        with pytest.raises(ExportError, match=said):
            image_settings(SimpleNamespace(name="checkpoint", path=tmp_path), tokenizer())
