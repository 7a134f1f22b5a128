"""Refuses what no model could read before it is tokenised."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from .errors import ApiError
from .shares import SPLITTING, parts

# What these normalisers make of a text has at least a quarter of its characters; others may leave out any number.
KEEPING = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend", "ByteLevel")
COMPOSED = 4


class Longest:
    """Knows how many characters so many tokens can stand for, at most."""

    def __init__(self, tokenizer: Tokenizer, file: Path) -> None:
        self.token = most_characters(tokenizer, json.loads(file.read_text(encoding="utf-8")))

    def require(self, characters: int, tokens: int, field: str) -> None:
        """Refuse a text that has more than so many tokens, whatever they are."""
        if self.token is not None and characters > self.token * tokens:
            raise ApiError(
                400,
                f"{field} has {characters:,} characters, expected at most {tokens:,} tokens, which are at most "
                f"{self.token * tokens:,}; shorten it",
                field,
                "context_length_exceeded",
            )


def most_characters(tokenizer: Tokenizer, spec: dict[str, Any]) -> int | None:
    """Return the length of the longest text that is one token; None if a token may stand for any length."""
    normalisers, splitters = (parts(spec.get(name)) for name in ("normalizer", "pre_tokenizer"))
    model = spec["model"]
    whole = model.get("unk_token") is None or model.get("byte_fallback")  # else unknown characters are one token
    kept = all(one["type"] in KEEPING or _replaces_as_many(one) for one in normalisers)
    split = all(one["type"] in SPLITTING and one.get("behavior") != "Removed" for one in splitters)
    if not (whole and kept and split):
        return None
    composed = COMPOSED if any(one["type"].startswith("NF") for one in normalisers) else 1
    return composed * max(map(len, tokenizer.get_vocab()))


def _replaces_as_many(part: dict[str, Any]) -> bool:
    pattern = part.get("pattern", {}).get("String") if part["type"] == "Replace" else None
    return pattern is not None and len(pattern) <= len(part.get("content", ""))
