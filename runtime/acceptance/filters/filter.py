"""The interface of every filter: one way in which a request changes the distribution of its next token."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ...state.place import on_host
from ...state.proposal import ProposedTokens
from ...state.rows import Columns
from ..parameter_fields import ParameterFields


class Filter:
    """One object serves all decoders: the columns of `Rows` hold what it knows of a request.

    A row that does not ask for a filter must pass through it unchanged, because its neighbours may ask for it.
    """

    fields: ClassVar[Mapping[str, str]] = {}  # the parameters it reads, each with its help
    reads_proposals: ClassVar[bool] = False  # whether it depends on the tokens of the same round
    reads_trees: ClassVar[bool] = False  # if so, whether it knows that they may be a tree; else a request has one line
    reported: ClassVar[bool] = False  # whether its rows report log-probs of what it and filters before it leave
    on_host: ClassVar[bool] = False  # whether it works on the host in a round, which can then not be recorded

    def check(self, params: ParameterFields) -> None:
        """Refuse parameters that make no sense, with a `RequestError`."""

    def active(self, params: ParameterFields) -> bool:
        """Whether this request needs the filter."""
        raise NotImplementedError

    def columns(self, rows: int, vocab_size: int, device: str) -> Columns:
        """Make columns for this many rows, on a GPU in full size: what a recorded round reads must not move."""
        return {}

    def admit(
        self, columns: Columns, row: int, params: ParameterFields, prompt: Sequence[int], vocab_size: int
    ) -> None:
        """Fill a row for a request that begins in it."""

    def commit(self, columns: Columns, tokens: Tensor, accepted: Tensor) -> None:
        """Take note of a round: `tokens` [A, K+1] are committed up to and including index `accepted` [A]."""


class Change(Filter):
    """A filter that computes new scores."""

    def apply(self, scores: Tensor, columns: Columns, proposed: ProposedTokens | None) -> Tensor:
        """Return new scores [A, W, V]. `proposed` are tokens of this round, if a filter reads them."""
        raise NotImplementedError


class Cut(Filter):
    """A filter that excludes the tokens whose score is below a threshold. All cuts share one sort."""

    reads_kept: ClassVar[bool] = False  # whether its threshold depends on what earlier cuts kept

    def threshold(self, ordered: Tensor, kept: Tensor, columns: Columns) -> Tensor:
        """Return thresholds [A, W, 1]. `ordered` [A, W, V] are all scores, rising; `kept` those that cuts left."""
        raise NotImplementedError


def cut_below(scores: Tensor, threshold: Tensor) -> Tensor:
    """Set scores below the threshold to -inf."""
    return torch.where(scores >= threshold, scores, -torch.inf)


def widened(tensor: Tensor, size: int) -> Tensor:
    return tensor if tensor.shape[1] else tensor.new_zeros(len(tensor), size)


def wide(rows: int, vocab_size: int, device: str) -> Tensor:
    """Make a column with a number for each token; on the CPU it stays empty until the first request needs it."""
    return torch.zeros(rows, 0 if on_host(device) else vocab_size, device=device)
