"""The bytes that each token of a tokenizer stands for, however its vocabulary spells them."""

import json
import re
from collections.abc import Iterator
from typing import Any

from ...engines.symbols import BYTE_OF_SYMBOL

BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # a token that stands for a byte no other has
SPACE = "▁"  # a space, as sentencepiece spells it


def spelling(tokenizer: Any) -> dict[int, bytes]:
    """Return the bytes of all tokens that are text; special tokens are none."""
    fields = json.loads(tokenizer.to_str())
    added = {token["id"]: token for token in fields["added_tokens"]}
    kinds = {part["type"] for name in ("pre_tokenizer", "decoder") for part in _parts(fields.get(name))}
    read = _of_symbols if "ByteLevel" in kinds else _of_pieces
    found: dict[int, bytes] = {}
    for token, index in tokenizer.get_vocab(with_added_tokens=True).items():
        own = added.get(index)
        spelled = read(token) if own is None else None if own["special"] else token.encode()
        if spelled:
            found[index] = spelled
    return found


def _parts(field: Any) -> Iterator[dict[str, Any]]:
    """Yield the parts of a field of tokenizer.json, which may be a sequence of them."""
    if field is not None:
        yield field
        for part in (*field.get("pretokenizers", ()), *field.get("decoders", ())):
            yield from _parts(part)


def _of_symbols(token: str) -> bytes | None:
    """Read the printable characters that stand for bytes in byte-level BPE."""
    try:
        return b"".join(BYTE_OF_SYMBOL[symbol] for symbol in token)
    except KeyError:
        return None


def _of_pieces(token: str) -> bytes:
    byte = BYTE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE, " ").encode()
