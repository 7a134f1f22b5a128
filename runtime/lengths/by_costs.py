"""What one request lets a controller choose for it, and what it has learned of its drafters."""

from collections.abc import Sequence
from typing import NamedTuple

from ..requests.metrics import Beside, Outcome
from ..state.asked import NOTHING, Share
from ..state.shapes import line
from .beside import Shapes
from .chooser import TRIAL, Chooser
from .estimate import Estimate, expected_tokens, tokens_beside


class Choice(NamedTuple):
    draft_length: int
    drafters: Sequence[str]  # each request takes the best of these
    shape: int = 0  # which of the shapes is beside lines of the drafter that can have it
    hanger: str | None = None
    trial_ms: float = 0.0  # what a trial would lose against a round without proposals


class ByCosts(Chooser):
    """Holds what a controller has chosen for one request, from the drafters that it has estimates of."""

    def __init__(self, estimates: dict[str, Estimate], beyond: int, shapes: Shapes, adapter: object = None) -> None:
        super().__init__()
        self.adapter = adapter  # of the request, if it has one; a draft has none, so that it meets with less success
        self.estimates = estimates
        self.beyond = beyond  # the most proposals that it may have beside its line
        self._shapes = shapes
        self.best: str | None = None  # the drafter worth most to this request; None if none pays
        self.token_ms: float | None = None  # what its draft had to read when it first chose, for each token to come
        self.has_learned = False  # since it last chose
        self.accepted = 0  # accepted proposals of its last round

    @property
    def drafters(self) -> Sequence[str]:
        return tuple(self.estimates)

    def observe(self, drafter: str, outcome: Outcome, entropies: Sequence[float], beside: Beside | None = None) -> None:
        estimate = self.estimates.get(drafter)
        if estimate is None:
            return
        self.has_learned, self.accepted = True, outcome.in_output
        of_line = min(outcome.in_output, outcome.accepted - (beside.accepted if beside else 0))
        estimate.observe(outcome.proposed, min(outcome.examined, of_line + 1), of_line)
        if beside is not None and (expected := self._shapes.as_measured(drafter, beside.shape)):
            estimate.observe_beside(beside.accepted, expected)

    def choose(self, choice: Choice) -> None:
        """Take the best drafter that the round pays for; once in a while try another, which may have become better."""
        k, self.best, self.has_learned = choice.draft_length, None, False
        if not k:
            self._wanted = NOTHING
        elif len(self.estimates) == 1:
            [name] = self.estimates
            self._wanted = self._with_beside(k, name, choice) if name in choice.drafters else NOTHING
        else:
            worth = {name: self._worth(name, choice) for name in choice.drafters if name in self.estimates}
            if not worth:
                self._wanted = NOTHING
                return
            self.best = chosen = max(worth, key=worth.__getitem__)
            for name, estimate in self.estimates.items():
                if estimate.pause.over and name != self.best:
                    chosen = name
            tries = chosen not in choice.drafters
            self._wanted = Share.of(line(min(k, TRIAL)), chosen) if tries else self._with_beside(k, chosen, choice)

    def _has_beside(self, drafter: str, choice: Choice) -> bool:
        return drafter == choice.hanger and self._shapes.beyond[choice.shape] <= self.beyond

    def _with_beside(self, k: int, drafter: str, choice: Choice) -> Share:
        shape = self._shapes.beside(k, choice.shape) if self._has_beside(drafter, choice) else line(k)
        return Share.of(shape, drafter)

    def _worth(self, name: str, choice: Choice) -> float:
        k, levels = choice.draft_length, self.estimates[name].levels
        tokens = expected_tokens(levels, k)[k]
        if self._has_beside(name, choice):
            tokens += tokens_beside(levels, self._shapes, name, self.beyond, k)[choice.shape, k]
        return float(tokens)

    def count(self) -> None:
        """Count a round that has ended: all drafters but the best have waited one round more."""
        self.accepted = 0  # until that is observed
        if self.beyond and not self._wanted.shape.beyond:
            for estimate in self.estimates.values():
                estimate.forget_beside()
        if self.best is not None:
            for name, estimate in self.estimates.items():
                if estimate.pause.over and name != self.best:
                    estimate.doubt()
                estimate.pause.count(used=name == self.best)
