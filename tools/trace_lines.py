"""Print a round of speculation on one line: accepted tokens green, the rejected one red, what replaces it blue."""

import os
from collections.abc import Iterator
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
        """Proposals that were not tested, after one that was rejected, are left out."""
        parts = [f"{number:4}", *(self._proposal(*each, tokenizer) for each in tested(traced))]
        if traced.next_token is not None:
            parts.append(f"{self._mark(NEXT, shown(traced.next_token, tokenizer))} {traced.next_p:.2f}")
        return "  ".join(parts)

    def _proposal(self, token: int, p: float, q: float, accepted: bool, entropy: float | None, tokenizer: Any) -> str:
        kind = ACCEPTED if accepted else REJECTED
        said = "" if entropy is None else f" H {entropy:.2f}"
        return f"{self._mark(kind, shown(token, tokenizer))} {p:.2f}/{q:.2f}{said}"

    def _mark(self, kind: str, text: str) -> str:
        return f"{COLOURS[kind]}{text}{RESET}" if self.coloured else kind + text


def tested(traced: TracedRound) -> Iterator[tuple[int, float, float, bool, float | None]]:
    """Yield the proposals in the order of their tests: token, p, q, whether it was accepted, the draft's entropy."""
    after: int | None = None  # the last accepted one, if it is not of the line
    for place in range(traced.accepted + (traced.next_token is not None)):
        accepted = False
        if after is None and place < len(traced.proposal):
            accepted = traced.standing[place : place + 1] == traced.proposal[place : place + 1]
            entropy = traced.entropies[place] if traced.entropies else None
            yield traced.proposal[place], traced.p[place], traced.q[place], accepted, entropy
        for at, one in enumerate(traced.siblings) if not accepted else ():
            if (one.after, one.place) == (after, place):
                yield one.token, one.p, one.q, one.stands, None
                if one.stands:
                    after = at
                    break


def shown(token: int, tokenizer: Any) -> str:
    """A token's text in quotes with control characters escaped, or its number if it is not a whole character."""
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    return f"<{token}>" if "\ufffd" in text or not text else repr(text)
