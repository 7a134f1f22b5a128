"""The tokens that recurrent layers read in a call, pending ones and its own, and how these see each other."""

from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from .cache import OPSET, Places, written

DOUBLINGS = 8  # of the blocks in which the delta rule is solved: a path has at most 2 ** 8 tokens


class Entries:
    """The tokens of a call after those that are pending, and how they see each other: the same for all layers."""

    def __init__(self, places: Places, pending: Tensor, count: Tensor, fold: Tensor, slot: Tensor) -> None:
        self.pending, self.count, self.fold, self.slot = pending, count, fold, slot
        batch, width = places.depths.shape
        before = pending.shape[1]
        number = torch.arange(before)
        self.counts = number < count[:, None]  # [B, P]
        own = torch.arange(width)
        order = torch.cat([number.expand(batch, -1), count[:, None] + own], 1)  # [B, N], as they are absorbed
        exist = torch.cat([self.counts, torch.ones(batch, width, dtype=torch.bool)], 1)
        self.absorbed = (order < fold[:, None]) & exist
        self.depth = torch.cat([number.expand(batch, -1), count[:, None] + places.depths], 1)  # [B, N]
        earlier = (number <= number[:, None])[None] & self.counts[:, None]  # [B, P, P]
        pending = self.counts[:, None].expand(-1, width, -1)  # [B, S, P]
        ahead = torch.zeros(batch, before, width, dtype=torch.bool)
        self.sees = torch.cat(  # [B, N, N], itself included
            [torch.cat([earlier, ahead], 2), torch.cat([pending, places.ancestors], 2)], 1
        )
        self._ancestors, self._depths = places.ancestors, places.depths
        self._taps: dict[int, Tensor] = {}
        self._tails: dict[int, Tensor] = {}
        self._halves: list[Tensor] = []
        self._room: Tensor | None = None

    def taps(self, count: int) -> Tensor:
        """Return where in [tail, pending, own] the inputs of each token are [B, N, taps], oldest first."""
        if count not in self._taps:
            tail, before = count - 1, self.pending.shape[1]
            back = torch.arange(tail, -1, -1)
            ours = (tail + torch.arange(before))[:, None] - back  # [P, taps]
            at = self._depths[:, :, None] - back  # [B, S, taps]: the depth of that ancestor
            there = self._ancestors[:, :, None] & (self._depths[:, None, None] == at[..., None])  # [B, S, taps, S]
            numbers = torch.arange(self._depths.shape[1])
            ancestor = torch.where(there, numbers, 0).amax(-1) + (tail + before)  # at most one, but of what is unused
            theirs = torch.where(at >= 0, ancestor, (self.count[:, None, None] + at + tail).clamp(min=0))
            self._taps[count] = torch.cat([ours.expand(theirs.shape[0], -1, -1), theirs], 1)
        return self._taps[count]

    def tails(self, size: int) -> Tensor:
        """Return where in [tail, pending, own] the inputs before the next token are [B, size]."""
        if size not in self._tails:
            place = self.fold[:, None] + torch.arange(size)
            count = self.count[:, None]
            self._tails[size] = torch.where(place < size + count, place, place - count + self.pending.shape[1])
        return self._tails[size]

    def halves(self) -> list[Tensor]:
        """Return of each doubling which tokens [B, N, N] are in the second half of a block whose first has others."""
        if not self._halves:
            blocks = torch.arange(2**DOUBLINGS)[:, None] // 2 ** torch.arange(DOUBLINGS)  # of each depth
            second = (blocks % 2 == 1)[self.depth].transpose(1, 2)  # [B, doublings, N]
            block = blocks[self.depth].transpose(1, 2)
            each = second[..., :, None] & (block[..., None, :] == block[..., :, None] - 1)
            self._halves = [one[:, None] for one in each.unbind(1)]
        return self._halves

    def kept(self, past: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """Write what is kept of the own tokens [B, S, size], as far as slots go.

        Return that state, and what is kept of all tokens [B, N, size].
        """
        if self._room is None:
            slots = _node("Shape", [past], torch.int64, (1,), start=2, end=3)
            self._room = torch.div(slots, 2, rounding_mode="floor")
        zero, axis = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
        most = _node("Slice", [own, zero, self._room, axis], own.dtype, own.shape)
        present = written(past, most[:, None], self.slot)
        found = torch.gather(present[:, 0], 1, self.pending[:, :, None].expand(-1, -1, own.shape[2]))
        return present, torch.cat([torch.where(self.counts[:, :, None], found, 0), own], 1)


def forget_lengths(graph: ir.Graph) -> None:
    """Forget how many tokens go into slots: a trace knows no number that is the lesser of two others."""
    for node in graph:
        if node.op_type == "TensorScatter" and node.inputs[2] is not None and node.inputs[2].name == "slot":
            value = node.inputs[1]
            while value is not None and (maker := value.producer()) is not None:
                value.shape = None
                value = maker.inputs[0] if maker.op_type != "Slice" else None


def _node(name: str, inputs: list[Tensor], dtype: torch.dtype, shape: Any, **attrs: Any) -> Tensor:
    return torch.onnx.ops.symbolic(name, inputs, attrs=attrs, dtype=dtype, shape=shape, version=OPSET)
