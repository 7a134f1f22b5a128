"""Tokenises what clients send while other threads go on."""

from tokenizers import Tokenizer


def encoded(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Tokenise a text without holding the interpreter's lock, as `encode` alone does for as long as it takes."""
    ids: list[int] = tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
    return ids
