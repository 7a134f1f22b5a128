"""Turns tokens into text, piece by piece: pieces split no character, show no stop string and add up to the text."""

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

CONTEXT = 8  # prompt tokens that decoders see before the output


class TextStream:
    """The growing text of one output. Text that may begin a stop string is held back."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: Sequence[str],
        *,
        include_stop: bool = False,
        show_special_tokens: bool = False,
    ) -> None:
        self._tokenizer, self._prompt = tokenizer, tuple(prompt[-CONTEXT:])
        self._include_stop, self._skip_special = include_stop, not show_special_tokens
        # Some decoders treat the first token of a text differently, so the stream begins inside the prompt, unless
        # the prompt ends in the middle of a character.
        context = list(prompt[-CONTEXT:])
        if tokenizer.decode(context, skip_special_tokens=self._skip_special).endswith("\ufffd"):
            context = []
        self._stream = DecodeStream(context, skip_special_tokens=self._skip_special)
        self._stop = tuple(stop)
        self._longest_stop = max(map(len, stop), default=1)
        self._pending: list[int] = []  # tokens whose text has not come out yet
        self.text = ""
        self.stopped_by: str | None = None  # the stop string that has ended it
        self._shown = 0

    def another(self) -> "TextStream":
        """Return the stream of another output of the same prompt."""
        return TextStream(
            self._tokenizer,
            self._prompt,
            self._stop,
            include_stop=self._include_stop,
            show_special_tokens=not self._skip_special,
        )

    def push(self, token: int) -> bool:
        """Add a token; return True when a stop string is complete, and then end the text before or after it."""
        self._pending.append(token)
        try:
            piece = self._stream.step(self._tokenizer, token)
        except Exception:  # some tokenizers fail on bytes that form no character; show U+FFFD
            piece = self._tokenizer.decode(self._pending, skip_special_tokens=self._skip_special)
            self._stream = DecodeStream(skip_special_tokens=self._skip_special)
        if not piece:
            return False
        self._pending.clear()
        return self._append(piece)

    def finish(self) -> bool:
        """End the text; bytes that never became a character come out as U+FFFD."""
        rest = self._tokenizer.decode(self._pending, skip_special_tokens=self._skip_special)
        self._pending.clear()
        return self._append(rest)

    def _append(self, piece: str) -> bool:
        before = len(self.text)
        self.text += piece
        if not self._stop:
            return False
        searched = max(0, before - self._longest_stop + 1)
        ends = [(at, stop) for stop in self._stop if (at := self.text.find(stop, searched)) >= 0]
        if ends:
            at, self.stopped_by = min(ends)
            self.text = self.text[: at + (len(self.stopped_by) if self._include_stop else 0)]
        return bool(ends)

    @property
    def settled(self) -> bool:
        """Whether the text of all tokens so far is certain."""
        return not self._pending and not self._held_back()

    def take(self, everything: bool = False) -> str:
        """Return the text that has not been taken yet: what is certain, or everything."""
        end = len(self.text) - (0 if everything else self._held_back())
        piece = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece

    def _held_back(self) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        for length in range(min(self._longest_stop - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stop):
                return length
        return 0
