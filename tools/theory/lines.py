"""The yield of speculation, by α (the share of examined proposals that are accepted), K, and the costs of a round.

The unit of costs is a target step for one token: c is a draft step, v the verify pass. Acceptances are independent.

That is a simplification. Where a rule judges proposals together, those after the first are accepted more often: with
α over all positions, E is right within a few per cent, too high for K = 1 and too low for long drafts.
"""

from collections.abc import Sequence
from math import inf


def tokens_per_round(alpha: float, k: int) -> float:
    """E, the expected number of accepted proposals and of the token that follows them."""
    return sum(alpha**i for i in range(k + 1))


def speed_up(alpha: float, k: int, c: float, v: float = 1.0) -> float:
    """S, how many times as fast as plain decoding, which has nothing to verify."""
    return tokens_per_round(alpha, k) / (c * k + (v if k else 1))


def operations_growth(alpha: float, k: int, c: float) -> float:
    """Arithmetic operations per token, relative to plain decoding; c compares operations here."""
    return (c * k + k + 1) / tokens_per_round(alpha, k)


def best_draft_length(alpha: float, c: float, longest: int, v: float = 1.0) -> int:
    """The K that theory would choose; 0 where no K pays."""
    return max(range(longest + 1), key=lambda k: speed_up(alpha, k, c, v))


def oracle_tokens_per_round(alpha: float) -> float:
    """E if each round proposed just as many as will be accepted; no K yields more."""
    return inf if alpha == 1 else 1 / (1 - alpha)


def lenient_acceptance(p: Sequence[float], q: Sequence[float], lenience: float) -> float:
    """α(l): p is compared with l·q, so that no token becomes likelier than p / l. Lossy for l < 1."""
    return sum(min(target / lenience, draft) for target, draft in zip(p, q, strict=True))
