"""Pearson's χ² with a stated false alarm and a stated power.

The statistic of n samples of p' against p is noncentral χ² with n · Σ (p' − p)² / p, which by Cauchy and Schwarz is at
least 4n · (total variation)²: so many samples catch any fault of a total variation.
"""

from collections import Counter
from collections.abc import Hashable, Mapping
from functools import lru_cache
from math import inf, log, sqrt

import torch
from torch import Tensor

from ...engines import RequestError

MOST = 4_000_000
FEWEST = 5  # expected in a cell that counts by itself


def tail(statistic: float, freedom: int, noncentrality: float = 0.0) -> float:
    """The probability that χ² exceeds `statistic`: a Poisson mixture of central ones."""
    half = noncentrality / 2
    spread = 12 * sqrt(half) + 12
    first = max(0, int(half - spread))
    terms = torch.arange(first, int(half + spread) + 1, dtype=torch.float64)
    if half == 0:
        terms, weights = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    else:
        weights = (terms * log(half) - half - torch.lgamma(terms + 1)).exp()
    return float((weights * _central(statistic, freedom / 2 + terms)).sum())


def _central(statistic: float, half_freedom: Tensor) -> Tensor:
    upper: Tensor = torch.special.gammaincc(half_freedom, torch.full_like(half_freedom, statistic / 2))
    return upper


@lru_cache(1024)
def threshold(false_alarm: float, freedom: int, noncentrality: float = 0.0) -> float:
    """Return the value that χ² exceeds with this probability."""
    low, high = 0.0, 10.0 * (freedom + noncentrality + 100)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, freedom, noncentrality) > false_alarm else (low, middle)
    return high


def samples_needed(
    freedom: int,
    total_variation: float,
    false_alarm: float,
    power: float,
    divergence: float = 0.0,
    expected: Mapping[Hashable, float] | None = None,
) -> int:
    """So many catch that total variation; `divergence` Σ (p' − p)² / p is what no fault must explain.

    With `expected` they catch it wherever it lies between these cells.
    """

    def catches(samples: int) -> bool:
        border = threshold(false_alarm, freedom, samples * divergence)
        return tail(border, freedom, least_noncentrality(samples, total_variation, expected or {})) >= power

    most = 1000
    while not catches(most):
        most *= 2
        if most > MOST:
            raise RequestError(
                f"a total variation of {total_variation:g} takes more than {MOST:,} samples to catch, where shapes "
                f"alone differ by a χ² of {divergence:.2g} a sample; raise --total-variation"
            )
    least = most // 2
    while most - least > 100:
        middle = (least + most) // 2
        least, most = (least, middle) if catches(middle) else (middle, most)
    return most


def statistic(observed: Counter[Hashable], expected: Mapping[Hashable, float]) -> tuple[float, int]:
    """Pearson's χ² and its degrees of freedom; rare cells count together, the impossible is infinitely far off."""
    samples = observed.total()
    if any(expected[cell] == 0 for cell in observed):
        return inf, 1
    rare = _rare(expected, samples)
    cells = [(samples * share, observed[cell]) for cell, share in expected.items() if share > 0 and cell not in rare]
    if rare:
        cells.append((samples * sum(rare.values()), sum(observed[cell] for cell in rare)))
    return sum((count - mean) ** 2 / mean for mean, count in cells), max(1, len(cells) - 1)


def least_noncentrality(samples: int, total_variation: float, expected: Mapping[Hashable, float]) -> float:
    """Return the least that a fault of that total variation adds to the statistic, wherever it lies in these cells."""
    return 4 * samples * max(0.0, total_variation - hidden(expected, samples)) ** 2


def hidden(expected: Mapping[Hashable, float], samples: int) -> float:
    """The most of a total variation that lies between rare cells, where the statistic of so many samples is blind."""
    rare = _rare(expected, samples)
    return sum(rare.values()) if len(rare) > 1 else 0.0


def _rare(expected: Mapping[Hashable, float], samples: int) -> dict[Hashable, float]:
    """Return cells that are expected too seldom, and the next ones until they are expected often enough together."""
    found: dict[Hashable, float] = {}
    mean = 0.0
    for cell in sorted((cell for cell, share in expected.items() if share > 0), key=expected.__getitem__):
        if samples * expected[cell] >= FEWEST and not 0 < mean < FEWEST:
            break
        found[cell] = expected[cell]
        mean += samples * expected[cell]
    return found


def total_variation(observed: Counter[Hashable], expected: Mapping[Hashable, float]) -> float:
    samples = observed.total()
    return sum(abs(observed[cell] / samples - share) for cell, share in expected.items()) / 2
