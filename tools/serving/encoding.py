"""Refuses what no model could read before it is tokenised."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from .errors import ApiError

# What these normalisers make of a text has at least a quarter of its characters; others may leave out any number.
KEEPING = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend", "ByteLevel")
COMPOSED = 4
SPLITTING = ("ByteLevel", "Metaspace", "Digits", "Punctuation", "Split")


class Longest:
    """Knows how many characters so many tokens can stand for, at most."""

    def __init__(self, tokenizer: Tokenizer, file: Path, max_length: int) -> None:
        self.tokens = max_length
        self.characters = most_characters(tokenizer, json.loads(file.read_text(encoding="utf-8")), max_length)

    def require(self, characters: int, field: str) -> None:
        """Refuse a text that the model cannot read, whatever its tokens are."""
        if self.characters is not None and characters > self.characters:
            raise ApiError(
                400,
                f"the {field} has {characters:,} characters, the model takes {self.tokens:,} tokens, which are at most "
                f"{self.characters:,}; shorten it",
                field,
                "context_length_exceeded",
            )


def most_characters(tokenizer: Tokenizer, spec: dict[str, Any], tokens: int) -> int | None:
    """Return the length of the longest text that is so many tokens; None if a token may stand for any length."""
    normalisers, splitters = (_parts(spec.get(name)) for name in ("normalizer", "pre_tokenizer"))
    model = spec["model"]
    whole = model.get("unk_token") is None or model.get("byte_fallback")  # else unknown characters are one token
    kept = all(one["type"] in KEEPING or _replaces_as_many(one) for one in normalisers)
    split = all(one["type"] in SPLITTING and one.get("behavior") != "Removed" for one in splitters)
    if not (whole and kept and split):
        return None
    composed = COMPOSED if any(one["type"].startswith("NF") for one in normalisers) else 1
    return tokens * composed * max(map(len, tokenizer.get_vocab()))


def _parts(spec: Any) -> list[dict[str, Any]]:
    """Return a part of a tokenizer, or all that a sequence of them holds."""
    if spec is None:
        return []
    parts = spec.get("normalizers", spec.get("pretokenizers"))
    return [spec] if parts is None else [one for part in parts for one in _parts(part)]


def _replaces_as_many(part: dict[str, Any]) -> bool:
    pattern = part.get("pattern", {}).get("String") if part["type"] == "Replace" else None
    return pattern is not None and len(pattern) <= len(part.get("content", ""))
