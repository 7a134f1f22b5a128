"""Track how far the states of recurrent layers have read, and which slots hold what has been read since.

The states of a row have absorbed its first `base` tokens. The tokens after these lie in one half of the row's slots,
one after another. The first call of a round absorbs them and writes its own tokens to the other half; calls that go on
after it only add to that half. So a row is truncated by its length alone, and nothing that may be rejected is ever
absorbed.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from .contract import MOST_SLOTS
from .engine import Step

if TYPE_CHECKING:
    from torch import Tensor

MOST_READ = 64  # tokens that one call may absorb of its own: what it computes grows with their square


class Recurrence:
    """The places of each row's states, on the device, so that a round needs nothing of the host.

    `half` says how many slots one call may fill, which is half of what a row has.
    """

    def __init__(self, rows: int, half: int, device: str) -> None:
        import torch

        self.half = half
        self.base = torch.zeros(rows, dtype=torch.int64, device=device)
        self.slot = torch.zeros(rows, dtype=torch.int64, device=device)  # the first of those with what was read since
        self.runs = torch.ones(rows, dtype=torch.bool, device=device)  # whether it takes part in a round
        self._own = torch.zeros(rows, dtype=torch.int64, device=device)  # the first slot of what a round reads
        self._numbers = torch.arange(MOST_SLOTS, device=device)

    def resize(self, half: int) -> None:
        """Let one call fill so many slots; what the first half held is moved by whom the memory belongs to."""
        self.slot[self.slot > 0] = half
        self.half = half

    def hold(self, row: int, tokens: int) -> None:
        """Note that the states of a row hold its first tokens, and that nothing has been read since."""
        self.base[row], self.slot[row] = tokens, 0

    def move(self, source: int, destination: int) -> None:
        for each in (self.base, self.slot):
            each[destination] = each[source]

    def swap(self, one: int, other: int) -> None:
        for each in (self.base, self.slot):
            each[[one, other]] = each[[other, one]]

    def resume(self, first: int, rows: int) -> None:
        """Let calls go on after what these rows have read, without a round that has begun."""
        these = slice(first, first + rows)
        self.runs[these] = True
        self._own[these] = self.slot[these]

    def begin(self, step: Step, first: int = 0) -> Step:
        """Return a step that absorbs all that its rows have read before, and none of its own tokens, which may fall.

        These are the rows from `first` on, as far as they take part.
        """
        import torch

        inputs, rows = step.inputs, slice(first, first + len(step.start))
        base, slot, runs, own = (each[rows] for each in (self.base, self.slot, self.runs, self._own))
        start, count, pending = inputs["start"], inputs["count"], inputs["pending"]
        before, numbers, half = slot[:, None], self._numbers[: pending.shape[1]], torch.full_like(slot, self.half)

        def run() -> None:
            torch.sub(start, base, out=count).mul_(runs)
            inputs["fold"].copy_(count)
            torch.add(before, numbers, out=pending)
            torch.sub(half, slot, out=own)
            inputs["slot"].copy_(own)
            step.run()
            base.add_(count)
            torch.where(runs, own, slot, out=slot)

        return replace(step, run=run)

    def read(self, step: Step, first: int, tokens: "Tensor | int") -> Step:
        """Return a step that also absorbs the first `tokens` of its own, in each row."""
        import torch

        inputs, rows = step.inputs, slice(first, first + len(step.start))
        base, slot, own = self.base[rows], self.slot[rows], self._own[rows]
        start, count, pending = inputs["start"], inputs["count"], inputs["pending"]

        def run() -> None:
            torch.sub(start, base, out=count)
            torch.add(count, tokens, out=inputs["fold"])
            torch.add(slot[:, None], self._numbers[: pending.shape[1]], out=pending)
            own.copy_(self.half - slot)
            inputs["slot"].copy_(own)
            step.run()
            torch.add(start, tokens, out=base)
            slot.copy_(own)

        return replace(step, run=run)

    def go_on(self, step: Step, first: int = 0) -> Step:
        """Return a step that absorbs nothing, after one that has begun: others will be read in its tokens' places."""
        import torch

        inputs, rows = step.inputs, slice(first, first + len(step.start))
        base, runs, own = self.base[rows], self.runs[rows], self._own[rows]
        start, count, pending = inputs["start"], inputs["count"], inputs["pending"]
        before, numbers = own[:, None], self._numbers[: pending.shape[1]]

        def run() -> None:
            torch.sub(start, base, out=count).mul_(runs)
            torch.add(before, numbers, out=pending)
            torch.add(own, count, out=inputs["slot"])
            step.run()

        return replace(step, run=run)

    def straighten(self, memory: "Tensor", start: "Tensor", path: "Tensor", first: int = 0) -> None:
        """Move what rows hold of a path [A, W] of their last call into order, in memory [states, rows, 1, slots, size].

        These are the rows from `first` on. What belongs to token start + path[i] goes where start + i belongs.
        """
        import torch

        rows = slice(first, first + len(path))
        runs = self.runs[rows]
        to = self._numbers[: path.shape[1]].expand_as(path)
        begin = (self.slot[rows] + torch.where(runs, start - self.base[rows], 0))[:, None]
        row = torch.arange(first, first + len(path), device=path.device)[:, None]
        memory[:, row, 0, begin + to] = memory[:, row, 0, begin + torch.where(runs[:, None], path, to)]
