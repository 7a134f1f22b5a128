"""Tells from the characters of a text how many tokens it has at least, without tokenising it."""

import json
from functools import lru_cache
from math import ceil
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from ...engines.symbols import BYTE_OF_SYMBOL

SPLITTING = ("ByteLevel", "Metaspace", "Digits", "Punctuation", "Split")
OF_ASCII_NOTHING = ("NFC", "NFD", "NFKC", "NFKD")  # normalisers that change no ASCII
SPACE = "▁"
PIECE = 2**14  # characters that are looked at before other threads have their turn
WHITE = [code for code in range(0x3001) if chr(code).isspace()]


class Shares(NamedTuple):
    """The least share of a token that each byte, or each character, is."""

    of_sign: NDArray[np.float64]  # [256] or [all of Unicode]
    of_ascii_alone: bool  # other characters may become others before they are tokenised


def least_tokens(tokenizer: Tokenizer, text: str) -> int:
    """Return how many tokens a text has at least.

    A token of n signs is at least 1/n for each of them, and no sign is less than its share in the longest token that
    has it. So all shares together are no more than the tokens.
    """
    shares = shares_of(tokenizer)
    if shares is None or (shares.of_ascii_alone and not text.isascii()):
        return 0
    form, kind = ("utf-8", np.uint8) if len(shares.of_sign) == 256 else ("utf-32-le", np.uint32)
    total = 0.0
    for first in range(0, len(text), PIECE):
        signs = np.frombuffer(text[first : first + PIECE].encode(form), kind).astype(np.intp)
        total += float(np.take(shares.of_sign, signs).sum())
    return ceil(total - 1e-3)  # as what rounding may add


@lru_cache(maxsize=8)
def shares_of(tokenizer: Tokenizer) -> Shares | None:
    """Return the shares of a tokenizer's signs; None if it may leave signs out, or make one token of any number."""
    spec = json.loads(tokenizer.to_str())
    model, (normalisers, splitters) = spec["model"], (parts(spec[name]) for name in ("normalizer", "pre_tokenizer"))
    whole = model["type"] == "BPE" and (model.get("unk_token") is None or model.get("byte_fallback"))
    changing = [one for one in normalisers if one["type"] != "Prepend" and not _marks_spaces(one)]
    kept = all(one["type"] in OF_ASCII_NOTHING for one in changing)
    split = all(one["type"] in SPLITTING and one.get("behavior") != "Removed" for one in splitters)
    split = split and all(one.get("replacement", SPACE) == SPACE for one in splitters)
    if not (whole and kept and split) or spec.get("truncation"):
        return None
    of_bytes = any(one["type"] == "ByteLevel" for one in splitters)
    longest: dict[int, int] = {}
    for piece in tokenizer.get_vocab(with_added_tokens=False):
        for letter in set(piece):
            sign = BYTE_OF_SYMBOL.get(letter, b"\0")[0] if of_bytes else ord(letter.replace(SPACE, " "))
            longest[sign] = max(longest.get(sign, 0), len(piece))
    for one in spec["added_tokens"]:
        signs = list(one["content"].encode() if of_bytes else map(ord, one["content"]))
        for sign in signs:
            longest[sign] = max(longest.get(sign, 0), len(signs))
    of_sign = np.zeros(256 if of_bytes else 0x110000)
    of_sign[list(longest)] = 1 / np.array(list(longest.values()), float)
    if any(one["lstrip"] or one["rstrip"] for one in spec["added_tokens"]):  # such a token takes any white space
        of_sign[sorted({byte for code in WHITE for byte in chr(code).encode()}) if of_bytes else WHITE] = 0
    return Shares(of_sign, bool(changing))


def parts(spec: Any) -> list[dict[str, Any]]:
    """Return a part of a tokenizer, or all that a sequence of them holds."""
    if spec is None:
        return []
    found = spec.get("normalizers", spec.get("pretokenizers"))
    return [spec] if found is None else [one for part in found for one in parts(part)]


def _marks_spaces(part: dict[str, Any]) -> bool:
    return part == {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
