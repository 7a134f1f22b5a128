"""What every filter is: one way in which a request changes the distribution its next token comes from."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..params import SamplingParams

Columns = dict[str, Tensor]  # by name, one entry a row: what the filters know of each request


class Filter:
    """One object serves all decoders: the columns of `Rows` hold what it knows of a request.

    A row that does not ask for a filter must pass through it unchanged, because its neighbours may ask for it.
    """

    fields: ClassVar[Mapping[str, str]] = {}  # the parameters it reads, each with its help
    reads_ahead: ClassVar[bool] = False  # whether it depends on the tokens of the same round

    def check(self, params: "SamplingParams") -> None:
        """Refuse parameters that make no sense, with a `RequestError`."""

    def active(self, params: "SamplingParams") -> bool:
        """Whether this request needs the filter."""
        raise NotImplementedError

    def columns(self, rows: int, vocab_size: int, device: str) -> Columns:
        """New columns for so many rows. On a GPU they have their full size: nothing may move that a record reads."""
        return {}

    def admit(
        self, columns: Columns, row: int, params: "SamplingParams", prompt: Sequence[int], vocab_size: int
    ) -> None:
        """Fill a row for a request that begins in it."""

    def commit(self, columns: Columns, tokens: Tensor, accepted: Tensor) -> None:
        """Take note of a round: `tokens` [A, K+1] stand up to and including index `accepted` [A]."""


class Change(Filter):
    """A filter that computes new scores."""

    def apply(self, scores: Tensor, columns: Columns, ahead: Tensor | None) -> Tensor:
        """Scores [A, W, V]. `ahead` [A, N] are tokens of this round, if a filter reads them: the last position comes
        after all of them, each position before it after one less."""
        raise NotImplementedError


class Cut(Filter):
    """A filter that excludes the tokens whose score is below a threshold. All cuts share one sort."""

    reads_kept: ClassVar[bool] = False  # whether its threshold depends on what earlier cuts left in

    def threshold(self, ordered: Tensor, kept: Tensor, columns: Columns) -> Tensor:
        """[A, W, 1]. `ordered` [A, W, V] are all scores, ascending; `kept` those that earlier cuts left in."""
        raise NotImplementedError


def cut_below(scores: Tensor, threshold: Tensor) -> Tensor:
    """Scores below the threshold become -inf."""
    return torch.where(scores >= threshold, scores, -torch.inf)


def widened(tensor: Tensor, size: int) -> Tensor:
    return tensor if tensor.shape[1] else tensor.new_zeros(len(tensor), size)


def wide(rows: int, vocab_size: int, device: str) -> Tensor:
    """A column with a number for each token; on the CPU it gets them when the first request needs it."""
    return torch.zeros(rows, 0 if device == "cpu" else vocab_size, device=device)
