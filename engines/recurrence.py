"""Where the states of recurrent layers stand, and which slots hold what has been read since.

The states of a row have swallowed its first `base` tokens. The tokens behind these lie in one half of the row's slots,
one after another. The first call of a round swallows them and writes its own tokens to the other half; calls that go on
behind it only add to that half. So a row is truncated by its length alone, and nothing that may still fall is ever
swallowed.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from .engine import Step

if TYPE_CHECKING:
    from torch import Tensor

BEHIND = 2  # tokens before the proposals that a draft reads
MOST_READ = 64  # tokens that one call may swallow of its own: what it computes grows with their square


class Recurrence:
    """What is known of each row, on the device, so that a round needs nothing of the host."""

    def __init__(self, rows: int, device: str) -> None:
        import torch

        self.base = torch.zeros(rows, dtype=torch.int64, device=device)
        self.side = torch.zeros(rows, dtype=torch.int64, device=device)  # which half of its slots
        self.runs = torch.ones(rows, dtype=torch.bool, device=device)  # whether it takes part in a round
        self._each = torch.arange(2 * 64 * 64, device=device)

    def stand(self, row: int, tokens: int) -> None:
        """Note that the states of a row stand for its first tokens, and that nothing has been read since."""
        self.base[row], self.side[row] = tokens, 0

    def move(self, source: int, destination: int) -> None:
        for each in (self.base, self.side):
            each[destination] = each[source]

    def swap(self, one: int, other: int) -> None:
        for each in (self.base, self.side):
            each[[one, other]] = each[[other, one]]

    def begin(self, step: Step, half: int, first: int = 0) -> Step:
        """Return a step that swallows all that its rows have read before, and none of its own tokens, which may fall.

        These are the rows from `first` on, as far as they take part.
        """
        import torch

        inputs, (base, side, runs) = step.inputs, self._rows(step, first)
        start, count = inputs["start"], inputs["count"]

        def run() -> None:
            count.copy_(torch.where(runs, start - base, 0))
            inputs["fold"].copy_(count)
            self._name_slots(inputs, side, half)
            inputs["slot"].copy_((1 - side) * half)
            step.run()
            torch.where(runs, start, base, out=base)
            torch.where(runs, 1 - side, side, out=side)

        return replace(step, run=run)

    def read(self, step: Step, half: int, first: int, tokens: "Tensor | int") -> Step:
        """Return a step that also swallows the first `tokens` of its own, in each row."""
        inputs, (base, side, _) = step.inputs, self._rows(step, first)
        start, count = inputs["start"], inputs["count"]

        def run() -> None:
            count.copy_(start - base)
            inputs["fold"].copy_(count + tokens)
            self._name_slots(inputs, side, half)
            inputs["slot"].copy_((1 - side) * half)
            step.run()
            base.copy_(start + tokens)
            side.copy_(1 - side)

        return replace(step, run=run)

    def go_on(self, step: Step, half: int, first: int = 0) -> Step:
        """Return a step that swallows nothing: its tokens may fall, and others will be read in their places."""
        import torch

        inputs, (base, side, runs) = step.inputs, self._rows(step, first)
        start, count = inputs["start"], inputs["count"]

        def run() -> None:
            count.copy_(torch.where(runs, start - base, 0))
            self._name_slots(inputs, side, half)
            inputs["slot"].copy_(torch.where(runs, side * half + count, (1 - side) * half))
            step.run()

        return replace(step, run=run)

    def _rows(self, step: Step, first: int) -> "tuple[Tensor, Tensor, Tensor]":
        rows = slice(first, first + len(step.start))
        return self.base[rows], self.side[rows], self.runs[rows]

    def _name_slots(self, inputs: "Mapping[str, Tensor]", side: "Tensor", half: int) -> None:
        import torch

        pending = inputs["pending"]
        torch.add((side * half)[:, None], self._each[: pending.shape[1]], out=pending)

    def straighten(self, memory: "Tensor", start: "Tensor", path: "Tensor", first: int = 0) -> None:
        """Move what rows hold of a path [A, W] of their last call into order, in memory [states, rows, 1, slots, size].

        These are the rows from `first` on. What belongs to token start + path[i] goes where start + i belongs.
        """
        import torch

        half, rows = memory.shape[3] // 2, slice(first, first + len(path))
        base, side, runs = self.base[rows], self.side[rows], self.runs[rows]
        to = self._each[: path.shape[1]].expand_as(path)
        begin = (side * half + torch.where(runs, start - base, 0))[:, None]
        row = self._each[rows, None]
        memory[:, row, 0, begin + to] = memory[:, row, 0, begin + torch.where(runs[:, None], path, to)]
