"""The rounds of a beam search: the draft searches ahead, the target reads all that it found in one pass.

As long as the target's best continuations are among what it has read, the search goes on without another pass. So it
takes the steps of plain beam search, whatever the draft proposes.
"""

from collections.abc import Iterable, Sequence
from time import perf_counter

import torch
from torch import Tensor

from ...engines import RequestError
from ..acceptance.filters.bias import fill
from ..memory.model import Model
from ..requests.metrics import Outcome
from ..requests.request import Request
from ..state.shapes import Shape
from .node import Best, Node
from .search import Search
from .tail import Tail


class Beaming:
    """The search of one request, which has a row of the caches of its models."""

    def __init__(self, request: Request, target: Model, logits: Tensor) -> None:
        """Begin after the prompt, for which the target has given these `logits` [1, V]."""
        self.request = request
        self._target = Tail(target, len(request.prompt))
        self._draft: Tail | None = None
        self._stops = request.stop_ids
        self._root = Node(None, request.prompt[-1], -1)
        self.search = Search(request.params, request.stop_ids, self._root, request.forced)
        self._bias = torch.zeros_like(logits[0])
        fill(self._bias, request.params)
        self._root.said = self._best(logits, [self._root])[0]
        while self.search.may_step:
            self.search.step()

    def draft_by(self, draft: Model, row: int, tokens: Tensor) -> None:
        """Let a draft propose from now on; it reads what it has not read of the prompt's `tokens`."""
        draft.prefill([row], [tokens])
        self._draft = Tail(draft, len(self.request.prompt))

    def round(self, row: int, shape: Shape) -> Outcome:
        """Search as far as one pass of the target leads.

        The draft searches as many levels ahead as the shape is deep, with as many beams as it has proposals for, or as
        the request has.
        """
        began = perf_counter()
        search, before = self.search, self.search.length
        levels = max(0, min(shape.length, self.request.params.max_new_tokens - before - 1)) if self._draft else 0
        if levels:
            self._propose(row, levels, -(-shape.nodes // shape.length) if shape.beyond else len(search.running))
        drafted = perf_counter()
        unread = [node for beam in search.running for node in beam.node.below() if self._target.lacks(node)]
        unread = sorted(unread, key=lambda node: node.depth)[: self._target.model.engine.verify_width]
        logits = self._target.read(row, unread)
        for node, best in zip(unread, self._best(logits, unread), strict=True):
            node.said = best
        verified = perf_counter()
        while search.may_step:
            search.step()
        self._prune(row)
        ended = perf_counter()
        self.request.speculation.add_times(
            1e3 * (drafted - began), 1e3 * (verified - drafted), 1e3 * (ended - verified), 0.0
        )
        steps = search.length - before
        return Outcome(levels, steps - 1, steps)

    def leave(self, row: int) -> None:
        """Leave the prompt alone in the row's caches."""
        for tail in self._tails:
            tail.forget(row)

    @property
    def _tails(self) -> list[Tail]:
        return [self._target] if self._draft is None else [self._target, self._draft]

    def _propose(self, row: int, levels: int, count: int) -> None:
        """Let the draft search ahead from all beams, by the scores that they have, with `count` beams of its own."""
        assert self._draft is not None
        beams = [(beam.node, float(beam.score)) for beam in self.search.running]
        for _ in range(levels):
            self._guess(row, [node for node, _ in beams])
            found = [
                (score + float(said), node, token)
                for node, score in beams
                if (best := node.guessed) is not None
                for said, token in zip(best.scores, best.tokens.tolist(), strict=True)
                if token not in self._stops
            ]
            found.sort(key=lambda one: -one[0])
            beams = [(node.child(token), score) for score, node, token in found[:count]]

    def _guess(self, row: int, nodes: Iterable[Node]) -> None:
        """Let the draft read what it lacks of these nodes and of their paths."""
        assert self._draft is not None
        if unread := self._draft.lacking(nodes):
            logits = self._draft.read(row, unread)
            for node, best in zip(unread, self._best(logits, unread), strict=True):
                node.guessed = best

    def _best(self, logits: Tensor, nodes: Sequence[Node]) -> list[Best]:
        """Return what may follow each node best, by its logits [S, V], as transformers changes log-probabilities."""
        scores, params = logits.log_softmax(-1).add_(self._bias), self.request.params
        if early := [place for place, node in enumerate(nodes) if node.depth + 1 < params.min_tokens]:
            scores[torch.tensor(early)[:, None], torch.tensor([*self._stops])] = -torch.inf
        ends = params.extra.get("forced_end")
        if ends and (last := [place for place, node in enumerate(nodes) if node.depth + 2 == params.max_new_tokens]):
            scores[last] = -torch.inf
            scores[torch.tensor(last)[:, None], torch.tensor([*ends])] = 0
        values, tokens = scores.topk(self.search.kept)
        if not bool(values[:, 0].isfinite().all()):
            raise RequestError("a model gives no numbers for a token of this beam search; check its weights")
        return [Best(*pair) for pair in zip(values.cpu().numpy(), tokens.cpu().numpy(), strict=True)]

    def _prune(self, row: int) -> None:
        """Forget what no beam leads to, and settle what all beams say."""
        beams = [beam.node for beam in self.search.running]
        since = min(tail.settled for tail in self._tails)
        paths = [node.path(since) for node in beams]
        needed = {node for path in paths for node in path} | {node for beam in beams for node in beam.below()}
        trunk = []
        for level in zip(*paths, strict=True):
            if len(set(level)) > 1:
                break
            trunk.append(level[0])
        for node in (self._root, *needed):
            node.children = {token: child for token, child in node.children.items() if child in needed}
        for tail in self._tails:
            tail.keep(row, trunk, needed)
