"""Turns the fields of a body into those of SamplingParams."""

import hashlib
from typing import Any

from ...engines import RequestError
from .bodies import Generation
from .errors import ApiError

SAME = (  # fields that SamplingParams knows by the same name
    "temperature",
    "rule",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "min_p",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "allowed_token_ids",
    "num_beams",
    "length_penalty",
    "early_stopping",
)


def sampling_fields(body: Generation) -> dict[str, Any]:
    """Return what a body asks for, by the names of SamplingParams."""
    fields: dict[str, Any] = {name: value for name in SAME if (value := getattr(body, name)) is not None}
    if body.top_k is not None:
        fields["top_k"] = max(body.top_k, 0)  # other servers say -1 for off
    fields["include_stop"] = bool(body.include_stop_str_in_output)
    fields["show_special_tokens"] = body.skip_special_tokens is False
    if body.logit_bias is not None:
        fields["logit_bias"] = {_token_of(key): bias for key, bias in body.logit_bias.items()}
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options says how to stream, but stream is not true", "stream_options")
    return fields


def _token_of(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) < 10):
        raise RequestError(f"logit_bias has the key {key[:20]!r}, expected a token id", "logit_bias")
    return int(key)


def seed_of_choice(seed: int, choice: int) -> int:
    """Derive a seed of its own for each of n choices; the first has the request's."""
    if choice == 0:
        return seed % 2**64
    return int.from_bytes(hashlib.sha256(f"{seed}/{choice}".encode()).digest()[:8], "big")


def predicted_text(body: Generation) -> str:
    content = "" if body.prediction is None else body.prediction.content
    return content if isinstance(content, str) else "".join(part.text for part in content)
