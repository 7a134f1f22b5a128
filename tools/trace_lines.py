"""Print a round of speculation on one line: accepted tokens green, the rejected one red, what replaces it blue."""

import os
from dataclasses import dataclass
from typing import Any, TextIO

from ..runtime import TracedRound

ACCEPTED, REJECTED, NEXT = "+", "-", "="
COLOURS = {ACCEPTED: "\x1b[32m", REJECTED: "\x1b[31m", NEXT: "\x1b[34m"}
RESET = "\x1b[0m"
MEANINGS = {ACCEPTED: "accepted", REJECTED: "rejected", NEXT: "the target's own"}


@dataclass(frozen=True)
class Marks:
    """Marks that tell three kinds of tokens apart: colours on a terminal, characters elsewhere."""

    coloured: bool

    @classmethod
    def suited_to(cls, stream: TextIO) -> "Marks":
        return cls(stream.isatty() and not os.environ.get("NO_COLOR"))

    def legend(self) -> str:
        return (
            "   ".join(self._mark(kind, meaning) for kind, meaning in MEANINGS.items())
            + "   p/q: target's/draft's   H: draft's entropy"
        )

    def line(self, number: int, traced: TracedRound, tokenizer: Any) -> str:
        """Proposals after the first that does not stand are left out; other lines are in brackets."""
        left = any(one.stands for one in traced.siblings)  # the line, for another branch
        goes_on = traced.accepted < len(traced.proposal) and traced.next_token is not None and not left
        examined = traced.accepted + goes_on
        parts = [f"{number:4}"]
        for i, (token, p, q) in enumerate(zip(traced.proposal, traced.p, traced.q, strict=True)):
            if i < examined:
                stands = traced.standing[i : i + 1] == (token,)
                entropy = f" H {traced.entropies[i]:.2f}" if traced.entropies else ""
                parts.append(self._proposal(token, p, q, stands, tokenizer) + entropy)
                if not stands:
                    after, place = None, i  # of those that were tested next
                    for at, one in enumerate(traced.siblings):
                        if (one.after, one.place) == (after, place):
                            parts.append(self._proposal(one.token, one.p, one.q, one.stands, tokenizer))
                            after, place = (at, place + 1) if one.stands else (after, place)
                    break
        if traced.next_token is not None:
            parts.append(f"{self._mark(NEXT, shown(traced.next_token, tokenizer))} {traced.next_p:.2f}")
        parts += [f"({' '.join(shown(token, tokenizer) for token in line)})" for line in traced.beside]
        return "  ".join(parts)

    def _proposal(self, token: int, p: float, q: float, stands: bool, tokenizer: Any) -> str:
        kind = ACCEPTED if stands else REJECTED
        return f"{self._mark(kind, shown(token, tokenizer))} {p:.2f}/{q:.2f}"

    def _mark(self, kind: str, text: str) -> str:
        return f"{COLOURS[kind]}{text}{RESET}" if self.coloured else kind + text


def shown(token: int, tokenizer: Any) -> str:
    """A token's text in quotes with control characters escaped, or its number if it is not a whole character."""
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    return f"<{token}>" if "\ufffd" in text or not text else repr(text)
