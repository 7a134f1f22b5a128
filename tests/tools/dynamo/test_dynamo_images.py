"""Images in requests of NVIDIA Dynamo; that its frontend sends them so is tested in the tier `replicas`."""

from pathlib import Path
from typing import Any

import pytest
from trt_spec.engines import Bundle, RequestError
from trt_spec.runtime import Usage
from trt_spec.tools.dynamo.images import counted_by_router, hashes_of, placed, urls_of
from trt_spec.tools.dynamo.requests import usage_of

from ...kit.bundles import Pair
from ...kit.image_processors import reader_of, tokenizer, write_processor
from ...kit.images import image_file
from ...kit.seeing_models import Seeing

FILES = [image_file(57, 33), image_file(31, 90)]


def shows(kind: str, *items: dict[str, Any]) -> dict[str, Any]:
    return {"token_ids": [5], "multi_modal_data": {kind: list(items)}}


def test_images_are_named_by_their_urls():
    assert urls_of({"token_ids": [5]}) == urls_of({"multi_modal_data": None}) == urls_of(shows("video_url")) == []
    assert urls_of(shows("image_url", {"Url": "data:,a"}, {"Url": "http://b/"})) == ["data:,a", "http://b/"]


@pytest.mark.parametrize(
    ("kind", "items", "said"),
    [
        ("video_url", [{"Url": "data:,a"}], "video_url is refused: the model reads text and images; leave it out"),
        ("audio_url", [{"Url": "data:,a"}], "audio_url is refused: the model reads text and images; leave it out"),
        ("image_url", [{"Url": "a"}, {"Decoded": {}}], "image_url brings Decoded, expected Url: the worker decodes"),
        ("image_url", [{"UuidOnly": "a"}], "image_url brings UuidOnly, expected Url"),
    ],
)
def test_what_is_no_image_is_one_sentence(kind: str, items: list[dict[str, Any]], said: str):
    with pytest.raises(RequestError, match=f"^{said}"):
        urls_of(shows(kind, *items))


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "gemma3", "gemma3-crops", "smolvlm"])
def test_a_prompt_gets_what_stands_around_its_images_also_after_a_move(name: str, tmp_path: Path):
    """It is read as the library reads the text; what was said since follows."""
    reader, spoken = reader_of(write_processor(name, tmp_path)), tokenizer()
    pictures = [reader.read(content) for content in FILES]
    text, said = f"\n{reader.placeholder}\nand{reader.placeholder} x", spoken.encode("yes").ids
    alone = spoken.encode(reader.surrounded(text, pictures)).ids
    for more in ([], said):
        request = {"token_ids": spoken.encode(text).ids + more, "extra_args": {"formatted_prompt": text}}
        assert placed(request, pictures, reader, spoken) == (alone + more, len(more))
    assert (alone != spoken.encode(text).ids) == name.startswith("gemma3"), "which the frontend does not know"


def test_tokens_that_are_not_those_of_the_text_are_one_sentence(tmp_path: Path):
    reader, spoken = reader_of(write_processor("gemma3", tmp_path)), tokenizer()
    for arguments in ({}, {"extra_args": None}, {"extra_args": {"formatted_prompt": "a b"}}):
        with pytest.raises(RequestError, match="token_ids do not begin as formatted_prompt does; send messages"):
            placed({"token_ids": [5, 6]} | arguments, [], reader, spoken)


def test_usage_has_the_tokens_of_images_and_what_was_said_before_a_move():
    assert usage_of(Usage(100, 20, 32), 7) == {
        "prompt_tokens": 93,
        "completion_tokens": 27,
        "total_tokens": 120,
        "prompt_tokens_details": {"cached_tokens": 32},
    }


def test_the_router_says_by_what_it_knows_images():
    assert hashes_of({"extra_args": {"mm_hashes": ["02677bd09dd97ca0", "000000000000000a"]}}) == [0x2677BD09DD97CA0, 10]
    assert hashes_of({}) == hashes_of({"extra_args": None}) == hashes_of({"extra_args": {}}) == []


def test_the_router_is_told_how_to_count_tokens_where_it_can(llava: Seeing, llama: Pair):
    name, config, pixels = counted_by_router(Bundle.open(llava.bundle))
    assert (name, config) == ("llava-1.5", {"model_type": "llava", "image_token_id": llava.image_token})
    assert (pixels["size"]["shortest_edge"] // pixels["patch_size"]) ** 2 == len(llava.read(FILES[:1])[0].tokens)
    assert counted_by_router(Bundle.open(llama.bundle)) == ("card", {}, {})
