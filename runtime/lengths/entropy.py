"""Chooses the draft length by how sure the draft is of itself; no costs have to be measured.

Entropy is normalised: 0 if the draft is certain, 1 if all tokens are equally likely. Like every chooser, this one
learns only from examined proposals. To stop within a round, it reads the draft's distribution before a token is drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from ...engines import RequestError
from ..drafters import NONE
from ..requests.metrics import Beside, Outcome
from .chooser import NOTHING, Chooser, Pause, Wanted

TRIAL = 2  # proposals in a round that tests whether the draft has become surer


@dataclass(frozen=True)
class EntropyRule:
    """A draft length that falls from `longest`, where the draft is certain, to `shortest`."""

    shortest: int = 1
    longest: int = 8
    smoothing: float = 0.5  # weight that the earlier entropy keeps after one more round
    stop_above: float = 1.0  # a round stops proposing once the draft's entropy exceeds this

    def __post_init__(self) -> None:
        for name in ("shortest", "longest"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 0:
                raise RequestError(f"{name} is {getattr(self, name)!r}, expected a whole number >= 0")
        if not self.shortest <= self.longest:
            raise RequestError(f"shortest is {self.shortest}, expected at most longest, which is {self.longest}")
        for name in ("smoothing", "stop_above"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value <= 1:
                raise RequestError(f"{name} is {value!r}, expected a number from 0 to 1")


HELP = {
    "shortest": "fewest proposals in a round, used when the draft's entropy is 1",
    "longest": "most proposals in a round, used when the draft's entropy is 0",
    "smoothing": "weight of earlier rounds in the entropy that counts, 0 to 1",
    "stop_above": "stop proposing in a round once the draft's entropy exceeds this, 0 to 1",
}
assert list(HELP) == [field.name for field in fields(EntropyRule)]


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
    def wanted(self) -> Wanted:
        length = self._length or (min(TRIAL, self.rule.longest) if self._pause.over else 0)
        if not length or self._drafter == NONE:
            return NOTHING._replace(entropy_limit=self.rule.stop_above)
        return Wanted(length, self._drafter, self.rule.stop_above)

    def observe(self, drafter: str, outcome: Outcome, entropies: Sequence[float], beside: Beside | None = None) -> None:
        self._pause.count(used=self._length > 0)
        if entropies:
            mean, left = sum(entropies) / len(entropies), self.rule.smoothing
            self._entropy = mean if self._entropy is None else left * self._entropy + (1 - left) * mean
