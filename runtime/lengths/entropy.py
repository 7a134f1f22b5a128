"""Chooses the draft length by how sure the draft is of itself; no costs have to be measured.

Entropy is normalised: 0 if the draft is certain, 1 if all tokens are equally likely. Like every chooser, this one
learns only from examined proposals. To stop within a round, it reads the draft's distribution before a token is drawn.
"""

from collections.abc import Sequence

from ..requests.metrics import Beside, Outcome
from ..state.asked import NONE, EntropyRule, Share
from ..state.shapes import line
from .chooser import TRIAL, Chooser, Pause


class ByEntropy(Chooser):
    """Follows an EntropyRule. If the rule leads to no proposals at all, it tries a few from time to time."""

    def __init__(self, rule: EntropyRule, drafter: str) -> None:
        super().__init__()
        self.rule, self._drafter = rule, drafter
        self._entropy: float | None = None
        self._pause = Pause()

    @property
    def drafters(self) -> Sequence[str]:
        return () if self._drafter == NONE else (self._drafter,)

    @property
    def _length(self) -> int:
        rule = self.rule
        return round(rule.longest - (rule.longest - rule.shortest) * (self._entropy or 0.0))

    @property
    def wanted(self) -> Share:
        length = self._length or (min(TRIAL, self.rule.longest) if self._pause.over else 0)
        return Share.of(line(length), self._drafter, self.rule.stop_above)

    def observe(self, drafter: str, outcome: Outcome, entropies: Sequence[float], beside: Beside | None = None) -> None:
        self._pause.count(used=self._length > 0)
        if entropies:
            mean, left = sum(entropies) / len(entropies), self.rule.smoothing
            self._entropy = mean if self._entropy is None else left * self._entropy + (1 - left) * mean
