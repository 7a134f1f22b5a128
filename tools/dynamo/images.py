"""Images in requests of NVIDIA Dynamo: its frontend writes a placeholder for each, and leaves the rest to workers.

A request that moves brings its images along, and the other worker reads them again.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from ...engines import Bundle, RequestError
from ...runtime.images.picture import Picture
from ...runtime.images.reader import SETTINGS, ImageReader
from ..serving.tokenising import encoded

IMAGES = "image_url"  # the only kind of media that is read
URL = "Url"  # an image as its URL; others are of frontends that decode it, or name one that a worker has seen


def urls_of(request: Mapping[str, Any]) -> list[str]:
    """Return the URLs of a request's images, and refuse whatever else it shows."""
    found = []
    for kind, items in (request.get("multi_modal_data") or {}).items():
        for item in items:
            if kind != IMAGES:
                raise RequestError(f"{kind} is refused: the model reads text and images; leave it out", kind)
            if list(item) != [URL]:
                raise RequestError(
                    f"{kind} brings {', '.join(item)}, expected {URL}: the worker decodes images itself; send them",
                    kind,
                )
            found.append(item[URL])
    return found


def placed(
    request: Mapping[str, Any], pictures: Sequence[Picture], reader: ImageReader, tokenizer: Tokenizer
) -> tuple[list[int], int]:
    """Return a request's tokens with what the processor writes around its images, which the frontend does not know.

    And how many at their end were said before the request moved.
    """
    ids, text = list(request["token_ids"]), (request.get("extra_args") or {}).get("formatted_prompt") or ""
    for special in (False, True):
        prompt = encoded(tokenizer, text, special)
        if text and ids[: len(prompt)] == prompt:
            said = ids[len(prompt) :]
            return [*encoded(tokenizer, reader.surrounded(text, pictures), special), *said], len(said)
    raise RequestError("token_ids do not begin as formatted_prompt does; send messages, and no tokens", "token_ids")


def hashes_of(request: Mapping[str, Any]) -> list[int]:
    """Return the numbers by which the router knows a request's images, if it tells them apart."""
    return [int(one, 16) for one in (request.get("extra_args") or {}).get("mm_hashes") or ()]


def counted_by_router(bundle: Bundle) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return what Dynamo's router counts the tokens of images by: a name, and of config and preprocessor_config.json.

    It knows some families. Requests to models of others go by what stands before their first image.
    """
    if bundle.vision is None:
        return "card", {}, {}
    kept = json.loads((bundle.path / SETTINGS).read_text(encoding="utf-8"))
    family, settings, token = kept["family"], kept["settings"], {"image_token_id": kept["image_token"]}
    if family == "qwen" and settings["bounds"] is not None:
        fewest, most = settings["bounds"]
        size = {"min_pixels": fewest, "max_pixels": most, "size": {"shortest_edge": fewest, "longest_edge": most}}
        patches = {"patch_size": settings["patch"], "merge_size": settings["merge"]}
        return "qwen-vl", {"model_type": "qwen2_5_vl", **token}, {**patches, **size}
    height, width = settings.get("crop") or settings.get("size") or (0, 1)
    if family == "llava" and settings["more"] == 0 and height == width:
        patches = {"patch_size": settings["patch"], "size": {"shortest_edge": height}}
        return "llava-1.5", {"model_type": "llava", **token}, patches
    return "card", {}, {}
