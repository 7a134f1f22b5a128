"""Judges the first token at which an output differs from its reference: a near tie, or a bug.

Widths and batch shapes round differently, so the winner may change where two scores, or a score and the border of a
filter, lie no further apart than what the shapes differ by. A difference is excused only if moving single logits of one
shape by at most 2 × the measured difference between the shapes, and at most 1e-3 in float32 (pitfall 13), makes either
token win; whatever else differs is a bug.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from ...runtime import SamplingParams
from ...runtime.grammars.compiler import Compiler
from .exact import compared
from .grammars import excluded
from .probe import Probe

HALVINGS = 20
ENDED = -1  # in the place of a token

Logits = Callable[[Sequence[int]], Tensor]  # [V] after a context


@dataclass(frozen=True)
class Difference:
    """The first token that differs, and what it takes to explain it."""

    position: int  # index in the output
    tokens: tuple[int, int]  # found, expected
    gap: float  # how much rounding makes either win in one shape
    between_shapes: float  # the largest difference of any logit
    allowed: float

    @property
    def near_tie(self) -> bool:
        return self.gap <= self.allowed

    def __str__(self) -> str:
        kind = "near tie" if self.near_tie else "bug"
        found, expected = self.tokens
        if ENDED in self.tokens:
            return f"{kind} at {self.position}: one output ends here, the other goes on"
        return (
            f"{kind} at {self.position}: token {found} for {expected}, gap {self.gap:.2g}, "
            f"allowed {self.allowed:.2g} (shapes differ by {self.between_shapes:.2g})"
        )


def first_difference(output: Sequence[int], expected: Sequence[int]) -> int | None:
    """Index of the first token that differs, one output ending early included."""
    for index, (found, wanted) in enumerate(zip(output, expected, strict=False)):
        if found != wanted:
            return index
    return None if len(output) == len(expected) else min(len(output), len(expected))


class Arbiter:
    """Runs the target in the shapes that took part; `others` are what else computed one of the two outputs.

    Outputs under a grammar need its `compiler`.
    """

    def __init__(
        self, probe: Probe, rounding: float, others: Sequence[Logits] = (), compiler: Compiler | None = None
    ) -> None:
        self.probe, self.rounding, self.others, self.compiler = probe, rounding, others, compiler
        self._lock = Lock()  # cases that run side by side share it

    def judge(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        output: Sequence[int],
        expected: Sequence[int],
        width: int,
        batch: int,
    ) -> Difference | None:
        """None where the tokens are equal."""
        at = first_difference(output, expected)
        if at is None:
            return None
        if at == min(len(output), len(expected)):  # no rounding makes equal tokens end differently
            ends = (*output[at : at + 1], ENDED)[0], (*expected[at : at + 1], ENDED)[0]
            return Difference(at, ends, inf, 0.0, 0.0)
        context, tokens = [*prompt, *expected[:at]], (output[at], expected[at])
        with self._lock:
            shapes = self.shapes(context, width, batch, at + 1)
            never = excluded(self.compiler, params, expected[:at], len(shapes[0]))
        between = max(float((a - b).abs().max()) for a in shapes for b in shapes)
        allowed = min(2 * between, self.rounding)

        def winner(logits: Tensor) -> int:
            left = logits.masked_fill(never, -inf)
            return int(compared(left, prompt, expected[:at], params).argmax())

        gap = min(
            max(rounding_until_wins(logits, winner, *pair, allowed) for pair in (tokens, tokens[::-1]))
            for logits in shapes
        )
        return Difference(at, tokens, gap, between, allowed)

    def shapes(self, context: Sequence[int], width: int, batch: int, decoded: int) -> list[Tensor]:
        """The logits after `context`, whose last tokens were decoded one by one, `width` at a time, alone and in
        `batch` rows, and not at all: each with the cache that it makes itself."""
        width = min(width, len(context))
        shapes = ((1, 1, decoded), (width, 1, decoded), (width, batch, decoded), (1, 1, 0))
        return [self.probe.distribution(context, *shape) for shape in shapes] + [
            other(context) for other in self.others
        ]


def rounding_until_wins(
    logits: Tensor, winner: Callable[[Tensor], int], token: int, rival: int, largest: float
) -> float:
    """The least move of logits with which `token` wins; infinite if `largest` is too little."""

    def wins(size: float) -> bool:
        return any(winner(moved) == token for moved in moves(logits, token, rival, size))

    if wins(0.0):
        return 0.0
    if not wins(largest):
        return inf
    low, high = 0.0, largest
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if wins(middle) else (middle, high)
    return high


def moves(logits: Tensor, token: int, rival: int, size: float) -> Iterator[Tensor]:
    """Try what may help the token to win: it rises, the rival sinks, or those likelier than either change their share,
    on which the border of top-p depends."""
    logits = logits.double()
    ids = torch.arange(len(logits))
    for mask, sign in (
        (ids == token, 1),
        (ids == rival, -1),
        (logits > logits[token], -1),
        (logits > logits[rival], 1),
    ):
        yield logits + sign * size * mask


def log_probabilities_agree(found: Any, expected: Any, tolerance: float) -> bool:
    """Compare the value of each token, and of the likeliest those that both list; the last of a list may change."""
    for one, other in zip(found or (), expected or (), strict=True):
        a, b = dict(one.top), dict(other.top)
        pairs = [(one.logprob, other.logprob), *((a[token], b[token]) for token in a.keys() & b.keys())]
        pairs += zip(sorted(a.values()), sorted(b.values()), strict=True)
        if one.token_id != other.token_id or any(abs(x - y) > tolerance for x, y in pairs):
            return False
    return True
