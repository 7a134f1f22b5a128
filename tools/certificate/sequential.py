"""A χ² test that looks at its samples several times and stops as soon as it knows.

Each look rejects where χ² is above what chance exceeds with probability false_alarm ÷ looks. It accepts where χ² is
below what the smallest fault to be caught stays below with a share of 1 − power; the last look accepts all that it does
not reject, and has so many samples that its own share holds. By the union bound, whatever the looks have in common,
chance is rejected with at most `false_alarm`, and a fault of the total variation or more is accepted with at most
1 − power: the statistic of n samples of it is noncentral χ² with at least 4n · (total variation)², less what rare cells
hide (chi_squared.py). Where nothing is wrong, this takes 0.36 to 0.4 of the samples of a single look.
"""

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import ceil, inf
from typing import Any

from .chi_squared import least_noncentrality, samples_needed, statistic, tail, threshold, total_variation

# The share of the samples, and of 1 − power, at each: simulated to take the fewest where nothing is wrong.
LOOKS = ((0.18, 0.25), (0.26, 0.4), (0.36, 0.2), (0.5, 0.1), (1.0, 0.05))
USUAL = 1  # two thirds of what is sound have been accepted by this look


@dataclass(frozen=True)
class SequentialTest:
    """Whether samples have the expected distribution or lie at least a total variation off."""

    expected: Mapping[Hashable, float]  # probability of each cell
    false_alarm: float
    total_variation: float
    power: float
    divergence: float = 0.0  # Σ (p' − p)² / p that is no fault

    @cached_property
    def looks(self) -> tuple[int, ...]:
        """The number of samples at each."""
        freedom = max(1, sum(share > 0 for share in self.expected.values()) - 1)
        missed = LOOKS[-1][1] * (1 - self.power)
        alarm = self.false_alarm / len(LOOKS)
        most = samples_needed(freedom, self.total_variation, alarm, 1 - missed, self.divergence, self.expected)
        return tuple(ceil(share * most) for share, _ in LOOKS)

    def passes(self, observed: Counter[Hashable], look: int) -> bool | None:
        """Return what a look decides; None if it takes more samples to know."""
        value, freedom = statistic(observed, self.expected)
        if value > self._rejects_above(observed.total(), freedom):
            return False
        if look == len(LOOKS) - 1:
            return True
        least = least_noncentrality(observed.total(), self.total_variation, self.expected)
        accepts_below = threshold(1 - LOOKS[look][1] * (1 - self.power), freedom, least) if least else 0.0
        return True if value < accepts_below else None

    def numbers(self, observed: Counter[Hashable]) -> dict[str, Any]:
        """Return the numbers of a look; any look rejects where the p-value is below `rejects_below`."""
        value, freedom = statistic(observed, self.expected)
        noncentrality = observed.total() * self.divergence
        return {
            "samples": observed.total(),
            "cells": len(self.expected),
            "chi_squared": None if value == inf else value,
            "threshold": self._rejects_above(observed.total(), freedom),
            "p_value": 0.0 if value == inf else tail(value, freedom, noncentrality),
            "rejects_below": self.false_alarm / len(LOOKS),
            "false_alarm": self.false_alarm,
            "total_variation_seen": total_variation(observed, self.expected),
            "shapes_divergence": self.divergence,
        }

    def _rejects_above(self, samples: int, freedom: int) -> float:
        return threshold(self.false_alarm / len(LOOKS), freedom, samples * self.divergence)
