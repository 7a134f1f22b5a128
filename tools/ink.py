"""Shows in a text what the draft proposed."""

import os
from typing import Any, TextIO

from ..runtime import Piece
from .trace_lines import RESET

DIM, GREEN = "\x1b[2m", "\x1b[32m"


class Ink:
    """Writes pieces as they come; on a terminal, what the draft proposed has a colour."""

    def __init__(self, stream: TextIO, tokenizer: Any, colour: str = DIM) -> None:
        self.coloured = stream.isatty() and not os.environ.get("NO_COLOR")
        self._stream, self._tokenizer, self._colour = stream, tokenizer, colour

    def write(self, piece: Piece) -> None:
        drafted, own = self._parts(piece)
        self._stream.write(f"{self._colour}{drafted}{RESET}{own}" if self.coloured and drafted else piece.text)
        self._stream.flush()

    def _parts(self, piece: Piece) -> tuple[str, str]:
        """Split a piece's text into what the draft proposed and the target's own token, which comes last."""
        if piece.from_draft and piece.from_draft[-1]:
            return piece.text, ""
        own = self._tokenizer.decode(piece.token_ids[-1:], skip_special_tokens=True) if any(piece.from_draft) else ""
        if own and piece.text.endswith(own):
            return piece.text[: -len(own)], own
        return ("", piece.text)
