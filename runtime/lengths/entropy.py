"""Another way to choose the draft length: by how sure the draft is of itself, with no costs to measure.

Entropy is normalised: 0 where the draft is certain, 1 where all tokens are alike. Like all that chooses, it reads what
was examined only; to stop within a round it reads the draft's distribution before a token is drawn from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ...engines import RequestError


@dataclass(frozen=True)
class EntropyRule:
    """As a request's draft length: from `longest` where the draft is certain down to `shortest`."""

    shortest: int = 1
    longest: int = 8
    smoothing: float = 0.5  # of the entropy so far, what one more round leaves
    stop_above: float = 1.0  # a round proposes no further where the draft's entropy exceeds this

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
    "shortest": "fewest proposals of a round, where the draft's entropy is 1",
    "longest": "most proposals of a round, where the draft's entropy is 0",
    "smoothing": "weight of earlier rounds in the entropy that counts, 0 to 1",
    "stop_above": "propose no further in a round once the draft's entropy exceeds this, 0 to 1",
}
assert list(HELP) == [field.name for field in fields(EntropyRule)]


class EntropyLevel:
    """The rule at work for one request."""

    def __init__(self, rule: EntropyRule) -> None:
        self.rule = rule
        self._entropy: float | None = None

    @property
    def draft_length(self) -> int:
        rule = self.rule
        return round(rule.longest - (rule.longest - rule.shortest) * (self._entropy or 0.0))

    def observe(self, examined: Sequence[float]) -> None:
        """The entropies at the examined proposals of a round."""
        if examined:
            mean, left = sum(examined) / len(examined), self.rule.smoothing
            self._entropy = mean if self._entropy is None else left * self._entropy + (1 - left) * mean


def normalised_entropy(logits: Tensor) -> Tensor:
    """Of the softmax of logits [A, V]: [A, 1] from 0 to 1."""
    nats: Tensor = torch.special.entr(logits.softmax(-1)).sum(-1, keepdim=True)
    return nats / torch.full_like(nats, logits.shape[-1]).log_()
