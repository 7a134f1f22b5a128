"""Tokenises what clients send while other threads go on."""

import ctypes

from tokenizers import Tokenizer

from ...engines import RequestError
from .shares import least_tokens

HUGE_TEXT = 2**16  # characters that may take seconds, for which others do not wait


class TooManyTokens(RequestError):
    """A text has more tokens than are asked for."""


def encoded(
    tokenizer: Tokenizer, text: str, add_special_tokens: bool, most: int | None = None, field: str = "prompt"
) -> list[int]:
    """Tokenise a text without holding the interpreter's lock, as `encode` alone does for as long as it takes.

    To make a list of millions of tokens holds it, too, so what has more than `most` is refused before, and a huge text
    before it is tokenised if its characters say so.
    """
    huge = len(text) >= HUGE_TEXT
    if huge and most is not None and (least := least_tokens(tokenizer, text)) > most:
        raise TooManyTokens(f"{field} has at least {least:,} tokens, expected at most {most:,}; shorten it", field)
    [found] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    count = len(found)
    ids: list[int] = found.ids if most is None or count <= most else []
    del found
    if huge:
        _give_memory_back()
    if most is not None and count > most:
        raise TooManyTokens(f"{field} has {count:,} tokens, expected at most {most:,}; shorten it", field)
    return ids


def _give_memory_back() -> None:
    """Give the system back what a huge text took: else the C library may keep a gigabyte of it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
