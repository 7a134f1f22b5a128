"""The images of one prompt: which of its tokens are entries of them, and where these stand."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ...engines import RequestError


class Picture(Protocol):
    """An image as `images.Picture` has it."""

    @property
    def inputs(self) -> Mapping[str, np.ndarray]: ...  # of the vision graph

    @property
    def tokens(self) -> tuple[int, ...]: ...  # in the prompt, those of entries among them

    @property
    def grid(self) -> tuple[int, int, int]: ...  # frames, rows and columns of entries, for positions

    @property
    def digest(self) -> str: ...


@dataclass(frozen=True, eq=False)
class Sight:
    """The entries of pictures among the tokens of a prompt, one picture after another."""

    pictures: tuple[Picture, ...]
    places: tuple[int, ...]  # of each entry in the prompt
    borders: tuple[int, ...]  # the entries of picture i are those from borders[i] to borders[i + 1]
    length: int  # of the prompt

    @classmethod
    def of(cls, ids: Sequence[int], pictures: Sequence[Picture], image_token: int, said: int = 0) -> "Sight":
        """Find the entries of pictures in a prompt, each of which is an `image_token`, before what the model `said`."""
        places = tuple(place for place, token in enumerate(ids[: len(ids) - said]) if token == image_token)
        borders = [0]
        for picture in pictures:
            borders.append(borders[-1] + sum(token == image_token for token in picture.tokens))
        if borders[-1] != len(places):
            raise RequestError(
                f"the prompt has {len(places)} tokens of images, its {len(pictures)} images have {borders[-1]}; "
                "give one placeholder for each image",
                "images",
            )
        return cls(tuple(pictures), places, tuple(borders), len(ids))

    @cached_property
    def marks(self) -> dict[int, bytes]:
        """What tells the images of prompts apart that have the same tokens: at each entry the digest of its image."""
        digests = [picture.digest.encode() for picture in self.pictures]
        return {
            place: digest
            for digest, (begin, end) in zip(digests, pairwise(self.borders), strict=True)
            for place in self.places[begin:end]
        }

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """Where entries stand side by side in the prompt: the first place of each run, and the one after its last."""
        jumps = [0, *(i + 1 for i, (one, other) in enumerate(pairwise(self.places)) if other != one + 1)]
        ends = [*jumps[1:], len(self.places)]
        return [(self.places[begin], self.places[end - 1] + 1) for begin, end in zip(jumps, ends, strict=True)]

    @property
    def end(self) -> int:
        """The place after the last entry."""
        return self.places[-1] + 1

    def before(self, place: int) -> int:
        """Return how many entries stand before a place."""
        return bisect_left(self.places, place)

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, slice]]:
        """Give the entries from `begin` to `end` as parts of pictures."""
        for number, (first, last) in enumerate(pairwise(self.borders)):
            if first < end and last > begin:
                yield number, slice(max(first, begin) - first, min(last, end) - first)

    def whole_runs(self, place: int) -> int:
        """Return the first place from this one on that lies within no run."""
        for begin, end in self.runs:
            if begin < place < end:
                return end
        return place

    @cached_property
    def offsets(self) -> Tensor:  # [3, length]
        """What each token's positions of time, height and width are beyond its place, as M-RoPE counts them.

        An image takes as many positions as it has rows or columns, whichever are more.
        """
        found = torch.zeros(3, self.length, dtype=torch.int64)
        place = position = 0
        for (begin, end), picture in zip(pairwise(self.borders), self.pictures, strict=True):
            first, last = self.places[begin], self.places[end - 1] + 1
            found[:, place:first] = position + torch.arange(first - place)
            position += first - place
            axes = torch.meshgrid(*map(torch.arange, picture.grid), indexing="ij")
            found[:, first:last] = position + torch.stack([axis.flatten() for axis in axes])
            position += max(picture.grid[1:])
            place = last
        found[:, place:] = position + torch.arange(self.length - place)
        return found - torch.arange(self.length)

    @property
    def shift(self) -> int:
        """What the positions of all tokens after the prompt are beyond their places."""
        return int(self.offsets[0, -1]) if self.end < self.length else self._after_the_last

    @property
    def _after_the_last(self) -> int:
        return int(self.offsets[:, -1].max())
