"""Packs the tokens of all rows into one call, and spreads the logits over the rows again.

Each token of a row with few tokens is a sequence of its own, which sees the blocks of its row up to itself. So its
logits do not depend on the tokens beside it: not on widths, other rows or padding.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..contract import ADAPTER, MAX_DRAFT_LENGTH
from .calls import Call, shared

NARROW = MAX_DRAFT_LENGTH + 1  # tokens of a row up to which each is a sequence of its own


class Packing:
    """The tensors of a step, and the tokens of its rows that count: those within the widths that the step gives."""

    def __init__(self, inputs: Mapping[str, Tensor], logits: Tensor) -> None:
        (self.batch, self.width), self.wanted_rows = inputs["input_ids"].shape, logits.shape[1]
        self.narrow = self.width <= NARROW
        self._ids, self._start = inputs["input_ids"].numpy().reshape(-1), inputs["start"].numpy()
        self._blocks, self._widths = inputs["blocks"].numpy().reshape(-1), inputs["widths"].numpy()
        self._adapter = inputs[ADAPTER].numpy() if ADAPTER in inputs else None
        self._logit_rows, self.logits = inputs["logit_rows"].numpy(), logits.numpy().reshape(-1, logits.shape[2])
        self._whole = shared(logits.reshape(-1, 1, logits.shape[2]))
        self._steps = np.arange(self.width)
        self._places = np.zeros((self.batch, self.width), np.int64)  # of all tokens, in their rows
        row = np.arange(self.batch)[:, None]
        self._first_token = row * self.width  # of each row
        self._first_block = (row * (len(self._blocks) // self.batch)).astype(np.int32)
        self._first_block_of_token = np.broadcast_to(self._first_block, (self.batch, self.width)).reshape(-1)

    def read(self) -> int:
        """Find the tokens that count and return their number."""
        np.add(self._start[:, None], self._steps, out=self._places)
        self._position = self._places.reshape(-1)
        if not self.narrow:
            self._sequences = np.where(self._widths > NARROW, 1, self._widths)  # of each row
        self._index = None  # of the tokens that count; None: all, as nearly always
        starts, widths = self._start.tolist(), self._widths.tolist()
        self._longest = max((start + width for start, width in zip(starts, widths, strict=True) if width), default=0)
        if min(widths) < self.width:
            self._index = np.flatnonzero(self._steps < self._widths[:, None])
            self._position = self._position[self._index]
        return len(self._position)

    def shape(self, tokens: int) -> tuple[int, int, int, int]:
        """Return the numbers of tokens, wanted rows, sequences and blocks of a call with so many tokens."""
        wanted = tokens if self.wanted_rows == self.width else self.batch * self.wanted_rows
        # An empty sequence at the end has OpenVINO compute tokens one by one, even if they are fewer than its threads.
        return tokens, wanted, 1 + (tokens if self.narrow else int(self._sequences.sum())), len(self._blocks)

    def run(self, call: Call) -> None:
        count = len(self._position)
        call.ids[:count, 0], call.positions[:count] = self._counting(self._ids), self._position
        call.blocks[:-1], call.longest[...] = self._blocks, self._longest
        if self._adapter is not None:
            call.adapter[:count] = self._counting(np.repeat(self._adapter, self.width))
        if self.narrow:
            call.past[:count] = self._position
            call.block_begins[:count] = self._counting(self._first_block_of_token)
            call.pad(count)
        else:
            row = np.repeat(np.arange(self.batch), self._sequences)
            token = np.arange(len(row)) - np.repeat(np.cumsum(self._sequences) - self._sequences, self._sequences)
            np.cumsum(np.where(self._widths[row] > NARROW, self._widths[row], 1), out=call.begins[1:-1])
            call.past[:-1], call.block_begins[:-2] = self._start[row] + token, self._first_block[row, 0]
            call.begins[-1] = count
        wanted, places = self._wanted(count)
        call.wanted[: len(wanted)], call.wanted[len(wanted) :] = wanted, 0
        if len(call.wanted) == len(self.logits) and self._index is None:
            call.run(self._whole)
        else:
            call.run(call.own)
            self.logits[places] = call.logits[: len(wanted), 0]

    def _counting(self, each: NDArray[Any]) -> NDArray[Any]:
        """Return the part that belongs to the tokens that count."""
        return each if self._index is None else each[self._index]

    def _wanted(self, count: int) -> tuple[NDArray[Any], Any]:
        """Return which tokens of the call give logits, and their rows among the step's logits."""
        wanted = (self._first_token + self._logit_rows).reshape(-1)
        if self._index is None:
            return wanted, slice(None)
        packed = np.full(self.batch * self.width, -1)  # the place of each token in the call
        packed[self._index] = np.arange(count)
        wanted = packed[wanted]
        places = np.flatnonzero(wanted >= 0)
        return wanted[places], places
