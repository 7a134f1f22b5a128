"""The images of a model's rows: what calls over them are given, and which images are still to be seen."""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ...engines import AXES, IMAGES, WHOLE_IMAGES, Contract, line
from .sight import Picture, Sight


@dataclass(eq=False)
class _Seated:
    sight: Sight
    entries: dict[int, Tensor] = field(default_factory=dict)  # [count, size] of each picture that was seen, by number


class ImageRows:
    """Holds entries of images for rows whose prompts are being read. Rounds need none of them, only positions."""

    def __init__(self, contract: Contract, device: str, max_rows: int) -> None:
        self._device = device
        self._rows: list[_Seated | None] = [None] * max_rows
        self._shift = torch.zeros(max_rows, dtype=torch.int64, device=device)  # stays in place, for recorded rounds
        self._read_by(contract)

    def _read_by(self, contract: Contract) -> None:
        self._vocab_size, self._size = contract.vocab_size, contract.image_size
        self._axes, self._whole = AXES in contract.capabilities, WHOLE_IMAGES in contract.capabilities

    def for_draft(self, contract: Contract) -> "ImageRows":
        """Return the same images of the same rows for a draft that sees them, too."""
        found = copy(self)
        found._read_by(contract)
        return found

    # Rows.

    def seat(self, row: int, sight: Sight | None) -> None:
        """Give a row the images of its new request."""
        self._note(row, None if sight is None else _Seated(sight))

    def move(self, source: int, destination: int) -> None:
        self._note(destination, self._rows[source])
        self._note(source, None)

    def swap(self, one: int, other: int) -> None:
        ours, theirs = self._rows[one], self._rows[other]
        self._note(one, theirs)
        self._note(other, ours)

    def end(self, row: int) -> int:
        """Return the place after the last image of a row; 0 if it has no entries."""
        seated = self._rows[row]
        return seated.sight.end if seated is not None and seated.entries else 0

    def let_go(self, row: int) -> None:
        """Let go of the entries of a row, whose images were read."""
        if (seated := self._rows[row]) is not None:
            seated.entries.clear()

    def _note(self, row: int, seated: _Seated | None) -> None:
        if seated is not self._rows[row]:
            self._rows[row] = seated
            if self._axes:
                self._shift[row] = 0 if seated is None else seated.sight.shift

    # Images.

    def lacking(self, row: int, read: int) -> Iterator[tuple[int, Picture, int]]:
        """Give the pictures that a row needs for its tokens from `read` on and does not have.

        Each has a number, and so many entries.
        """
        seated = self._rows[row]
        if seated is None:
            return
        sight, first = seated.sight, seated.sight.before(read)
        for number, _ in sight.pieces(first, len(sight.places)):
            if number not in seated.entries:
                first, last = sight.borders[number : number + 2]
                yield number, sight.pictures[number], last - first

    def put(self, row: int, number: int, entries: Tensor) -> None:
        seated = self._rows[row]
        assert seated is not None, "a row without images was seen"
        seated.entries[number] = entries

    def whole(self, row: int, end: int) -> int:
        """Return where a call should end that is to end there: after an image if its tokens see each other."""
        seated = self._rows[row]
        return end if seated is None or not self._whole else seated.sight.whole_runs(end)

    def widths(self, row: int, start: int, widths: list[int]) -> list[int]:
        """Return in which widths to read a row from `start` on, if these cut no image whose tokens see each other."""
        if self._rows[row] is None or not self._whole:
            return widths
        ends = sorted({self.whole(row, start + end) for end in accumulate(widths)})
        return [end - begin for begin, end in pairwise([start, *ends])]

    def begun(self, row: int, entries: int) -> int:
        """Return how many of a row's entries hold whole images, out of so many."""
        seated = self._rows[row]
        if seated is None or not self._whole:
            return entries
        return next((begin for begin, end in seated.sight.runs if begin < entries < end), entries)

    # Calls.

    def inputs(self, first: int, rows: int) -> Mapping[str, Tensor]:
        """Return what any call over these rows is given."""
        return {"shift": self._shift[first : first + rows]} if self._axes else {}

    def among(
        self, ids: Tensor, first: int, starts: Sequence[int], widths: Sequence[int]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Put entries among the tokens of prompts [B, S], so many of each row; return what the call is given, too."""
        rows = self._rows[first : first + len(starts)]
        if not any(rows):
            return ids, {}
        ids, found, given = ids.clone(), list[Tensor](), dict[str, Tensor]()
        batch, width = ids.shape
        if self._axes:
            given["offsets"] = torch.zeros(batch, 3, width, dtype=torch.int64)
        if self._whole:
            given |= line(batch, width, "cpu")
        for row, (seated, start, count) in enumerate(zip(rows, starts, widths, strict=True)):
            if seated is None:
                continue
            sight, end = seated.sight, start + count
            begin, last = sight.before(start), sight.before(end)
            places = torch.tensor(sight.places[begin:last], dtype=torch.int64, device=ids.device) - start
            ids[row, places] = self._vocab_size + sum(map(len, found)) + torch.arange(last - begin, device=ids.device)
            found += [seated.entries[number][part, : self._size] for number, part in sight.pieces(begin, last)]
            if self._axes:
                own = sight.offsets[:, start:end]
                given["offsets"][row] = sight.shift  # of tokens after the prompt
                given["offsets"][row, :, : own.shape[1]] = own
                given["offsets"][row] -= sight.shift
            for one, other in sight.runs if self._whole else ():
                if start <= one and other <= end:
                    given["ancestors"][row, one - start : other - start, one - start : other - start] = True
        if found:
            given[f"past_{IMAGES}"] = torch.cat(found)
        return ids, {name: tensor.to(self._device) for name, tensor in given.items()}
