"""Tokens as text and as bytes, and log-probabilities in the two shapes of OpenAI's API."""

import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...engines.symbols import BYTE_OF_SYMBOL
from ...runtime import TokenLogprob
from .answers import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob

SPACE = "▁"


class Spelling:
    """Knows the bytes that each token stands for."""

    def __init__(self, tokenizer: Any, file: Path) -> None:
        spec = json.loads(file.read_text(encoding="utf-8"))
        kinds = set(_types(spec.get("decoder")))
        self._tokenizer = tokenizer
        added = spec.get("added_tokens") or ()
        self._added = {int(one["id"]): str(one["content"]).encode() for one in added}
        self.special = frozenset(int(one["id"]) for one in added if one.get("special"))  # not in any text
        self._symbols = "ByteLevel" in kinds
        self._pieces = bool(kinds & {"ByteFallback", "Metaspace", "Replace"})
        self._known: dict[int, bytes] = {}
        self._shown: dict[int, tuple[str, list[int]]] = {}

    def to_bytes(self, token: int) -> bytes:
        if token not in self._known:
            self._known[token] = self._added.get(token) or self._spelt(token)
        return self._known[token]

    def to_text(self, token: int) -> str:
        """The token's text; one that is no whole character is spelt in bytes, as OpenAI's API does."""
        spelt = self.to_bytes(token)
        try:
            return spelt.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)

    def shown(self, token: int) -> tuple[str, list[int]]:
        """Return the token's text and its bytes, as numbers that nobody may change."""
        if token not in self._shown:
            self._shown[token] = self.to_text(token), list(self.to_bytes(token))
        return self._shown[token]

    def _spelt(self, token: int) -> bytes:
        piece = self._tokenizer.id_to_token(token)
        if piece is None:  # a number without a token, as padding of the vocabulary has
            return b""
        if self._symbols:
            return b"".join(BYTE_OF_SYMBOL.get(symbol, symbol.encode()) for symbol in piece)
        if self._pieces:
            if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
                return bytes.fromhex(piece[3:5])
            return str(piece).replace(SPACE, " ").encode()
        return str(self._tokenizer.decode([token], skip_special_tokens=False)).encode()


def _types(spec: Any) -> list[str]:
    """The types of a decoder and of its parts."""
    if not isinstance(spec, dict):
        return []
    return [spec.get("type", ""), *(kind for part in spec.get("decoders", ()) for kind in _types(part))]


def chat_logprobs(logprobs: Sequence[TokenLogprob], spelling: Spelling) -> ChatLogprobs:
    def named(token: int, logprob: float) -> TopLogprob:
        text, numbers = spelling.shown(token)
        return TopLogprob(text, logprob, numbers)

    content = []
    for one in logprobs:
        own = named(one.token_id, one.logprob)
        content.append(ChatLogprob(own.token, own.logprob, own.bytes, [named(*each) for each in one.top]))
    return ChatLogprobs(content)


class Offsets:
    """Finds where in the text each token begins; a character of several tokens begins with the first."""

    def __init__(self, at: int = 0) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = at

    def next(self, spelt: bytes) -> int:
        at = self._at
        self._at += len(self._decoder.decode(spelt))
        return at


def completion_logprobs(
    logprobs: Sequence[TokenLogprob | None], tokens: Sequence[int], spelling: Spelling, offsets: Offsets
) -> CompletionLogprobs:
    """Log-probabilities of these tokens; None stands for the first token of a prompt, which follows nothing."""
    top: list[dict[str, float] | None] = []
    for one in logprobs:
        if one is None:
            top.append(None)
            continue
        # The API promises up to top + 1 entries: the chosen token is always among them.
        each = {spelling.to_text(token): value for token, value in reversed(one.top)}
        top.append({spelling.to_text(one.token_id): one.logprob} | dict(reversed(each.items())))
    return CompletionLogprobs(
        tokens=[spelling.to_text(token) for token in tokens],
        token_logprobs=[None if one is None else one.logprob for one in logprobs],
        top_logprobs=top,
        text_offset=[offsets.next(b"" if token in spelling.special else spelling.to_bytes(token)) for token in tokens],
    )
