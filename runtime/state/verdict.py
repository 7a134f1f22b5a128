"""Fixed memory for the outcome of a round: which proposals are accepted in each row, and which token follows them."""

import torch
from torch import Tensor

from .indexing import counting
from .place import on_host


class Winners:
    """Fixed memory [A, W] for the tokens picked under the coupled rule; ties go to the lowest id.

    `logits` [A, W, V] are the scores if nothing transforms them. `best` [A, W] takes the scores of the tokens.
    """

    def __init__(self, logits: Tensor, tokens: Tensor, best: Tensor | None = None) -> None:
        self.logits, self.tokens, self._best = logits, tokens, best
        self._on_host = best is None and on_host(logits.device)
        if self._on_host:  # numpy's vectorised search takes a tenth of torch's time
            self._logits, self._tokens = logits.numpy(), tokens.numpy()

    def pick(self, scores: Tensor, gumbel: Tensor | None) -> Tensor:
        """Pick the best; return the scores with noise that they were picked by."""
        if gumbel is not None:
            scores = scores + gumbel
        if self._on_host:
            (self._logits if scores is self.logits else scores.numpy()).argmax(-1, self._tokens)
        elif self._best is not None:
            torch.max(scores, -1, out=(self._best, self.tokens))  # NaN is the largest
        else:
            torch.argmax(scores, -1, out=self.tokens)
        return scores


class JointWeights:
    """Memory of the weights w [A, K+1], the first of which stays 1, and of the rests r [A, K], the last 1."""

    def __init__(self, logits: Tensor) -> None:
        batch, width, _ = logits.shape
        self.weights = torch.ones(batch, width, dtype=torch.float64, device=logits.device)
        self.rests = torch.ones(batch, width - 1, dtype=torch.float64, device=logits.device)
        self.own, self.inner = self.weights[:, 1:], self.weights[:, 1:-1]
        self.inner_rests = self.rests[:, :-1]
        self.one = torch.ones((), dtype=torch.float64, device=logits.device)
        self.places = counting(width, logits.device)[1:]


class Verdict:
    """The outcome of a round: each row accepts `accepted` proposals, and the next token follows them.

    `logits` [A, N+1, V] follow each node, the first of them those of a line of `length`; None: they are no more than
    that. If it `reads_best`, the bits of the tokens' logits are the end of the table, where `best_of` reads them.
    """

    def __init__(self, logits: Tensor, length: int | None = None, *, reads_best: bool = False) -> None:
        batch, nodes, _ = logits.shape
        width = nodes if length is None else length + 1
        bytes_of_best = width * logits.dtype.itemsize if reads_best else 0
        words = width + 2 + -(-bytes_of_best // torch.int64.itemsize)
        self.table = torch.zeros(batch, words, dtype=torch.int64, device=logits.device)  # what the host copies
        self.accepted = self.table[:, 0]
        self.proposed = self.table[:, 1]
        self.tokens = self.table[:, 2 : width + 2]  # [A, K+1]: the accepted proposals, the next token, then garbage
        self.next_index = self.table[:, :1]  # [A, 1]: where in `tokens` the next token is
        self.leading = self.tokens[:, :-1]  # [A, K]
        # What the target picks after each node, the last accepted node, and all on the way to it, 0 after them.
        self.picked, self.last, self.path = self.tokens, self.accepted, counting(width, logits.device).expand(batch, -1)
        if nodes > width:
            self.picked = torch.zeros(batch, nodes, dtype=torch.int64, device=logits.device)
            self.last, self.path = self.picked[:, 0].clone(), self.tokens.clone()
        self.winners = Winners(logits, self.picked, best_of(self.table, width, logits.dtype) if reads_best else None)
        passed = torch.zeros(batch, width, dtype=torch.bool, device=logits.device)  # the last column stays False
        self.passed = passed[:, :-1]  # [A, K]
        self._passed = passed.view(torch.uint8)
        self._places = counting(width, logits.device)[:-1]
        self.joint = JointWeights(logits[:, :width])
        self.target_probabilities: Tensor | None = None  # [A, N+1, V]

    def accept_passed(self, proposed: Tensor | None, out: Tensor) -> None:
        """Write how many of a line come before the first that has not passed; None: each row proposes K."""
        if proposed is not None:
            self.passed.logical_and_(self._places < proposed[:, None])
        torch.argmin(self._passed, 1, out=out)

    def put(self, rows: Tensor | None, accepted: Tensor, path: Tensor) -> None:
        """Accept so many proposals [A] along a path [A, K+1], in these rows [A] or in all."""
        if rows is not None:
            accepted = torch.where(rows, accepted, self.accepted)
            path = torch.where(rows[:, None], path, self.path)
        self.accepted.copy_(accepted)
        self.path.copy_(path)
        self.last.copy_(self.path.gather(1, self.next_index)[:, 0])


def best_of(table: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return the part of a table that holds the logits [A, W] of its tokens."""
    return table[:, width + 2 :].view(dtype)[:, :width]
