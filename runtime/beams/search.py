"""Beam search as transformers does it, a step at a time: which beams go on, and which texts have ended.

Scores are added in float32 and in the order of transformers' own sums, so that ties fall as they do there wherever the
log-probabilities are equal.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..acceptance.sampling_params import SamplingParams
from .node import Node

NEVER = "never"  # early_stopping: search on until no text can become better


class Beam(NamedTuple):
    node: Node
    score: np.float32  # the sum of the log-probabilities of its tokens


class Ended(NamedTuple):
    """A text that has ended."""

    node: Node  # its last token follows this one
    token: int
    score: np.float32  # divided by the length's power

    @property
    def tokens(self) -> list[int]:
        return [*(node.token for node in self.node.path()), self.token]


class Search:
    """The beams of one request, the best first."""

    def __init__(self, params: SamplingParams, stops: frozenset[int], root: Node, forced: int = 0) -> None:
        self.running, self.ended = [Beam(root, np.float32(0))], list[Ended]()
        self.length = 0  # tokens of each running beam
        self.done = False
        self._params, self._stops, self._forced = params, stops, forced

    @property
    def kept(self) -> int:
        """How many of all continuations a step looks at: enough for all beams to go on."""
        return max(2, 1 + len(self._stops)) * self._params.num_beams

    @property
    def may_step(self) -> bool:
        """Whether the target has said what may follow each beam."""
        return not self.done and all(beam.node.said is not None for beam in self.running)

    def step(self) -> None:
        """Let each beam say one token more."""
        beams, last = self._params.num_beams, self.length + 1 == self._params.max_new_tokens
        found = self._continuations()
        hits = [last or token in self._stops for _, token, _ in found]
        self._end([one for one, hit in zip(found[:beams], hits, strict=False) if hit])
        going = [one for one, hit in zip(found, hits, strict=True) if not hit][:beams]
        self.running = [Beam(node.child(token), score) for node, token, score in going] or self.running
        self.length += 1
        self.done = last or not going or not self._may_improve(going[0].score) or self._is_full

    def best(self) -> list[Ended]:
        """Return the texts that were asked for, the best first."""
        return self.ended[: self._params.num_return_sequences]

    def _continuations(self) -> list[Ended]:
        """Return the best continuations of all beams, with the sums of their log-probabilities."""
        said = [(beam, beam.node.said) for beam in self.running]
        sums = [best.scores + beam.score for beam, best in said if best is not None]
        order = largest(np.concatenate(sums), self.kept)
        each = len(sums[0])
        return [
            Ended(self.running[place // each].node, int(best.tokens[place % each]), sums[place // each][place % each])
            for place in order
            if (best := self.running[place // each].node.said) is not None
        ]

    def _end(self, found: Sequence[Ended]) -> None:
        """Keep those of the texts that have just ended that are among the best."""
        if self._is_full:
            return
        power = self._power(self.length + 1)
        self.ended += [one._replace(score=one.score / power) for one in found]
        scores = np.array([one.score for one in self.ended], np.float32)
        self.ended = [self.ended[place] for place in largest(scores, self._params.num_beams)]

    def _power(self, length: int) -> np.float32:
        """Return what scores of texts of this length are divided by."""
        return np.float32((self._forced + length) ** self._params.length_penalty)

    @property
    def _is_full(self) -> bool:
        return self._params.early_stopping is True and len(self.ended) == self._params.num_beams

    def _may_improve(self, best: np.float32) -> bool:
        """Whether the best beam could still be better than the worst text that has ended, by transformers' estimate."""
        params = self._params
        longest = params.early_stopping == NEVER and params.length_penalty > 0
        power = self._power(params.max_new_tokens if longest else self.length)
        return len(self.ended) < params.num_beams or bool(best / power > self.ended[-1].score)


def largest(numbers: NDArray[np.float32], count: int) -> list[int]:
    """Return the places of the largest numbers, the largest first and equal ones in their order."""
    order: list[int] = np.argsort(-numbers, kind="stable")[:count].tolist()
    return order
