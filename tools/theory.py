"""What speculation yields, from α (acceptance of an examined proposal), K, and the costs of a round.

Costs are in target steps of width one: c for a draft step, v for the verify pass. Acceptances count as independent.
"""


def tokens_per_round(alpha: float, k: int) -> float:
    """E: the accepted proposals and the token that follows them."""
    return sum(alpha**i for i in range(k + 1))


def speed_up(alpha: float, k: int, c: float, v: float = 1.0) -> float:
    """S(K) over plain decoding."""
    return tokens_per_round(alpha, k) / (c * k + v)


def operations_growth(alpha: float, k: int, c: float) -> float:
    """Arithmetic operations per token over plain decoding; c compares operations here."""
    return (c * k + k + 1) / tokens_per_round(alpha, k)


def best_draft_length(alpha: float, c: float, longest: int) -> int:
    """The K that theory would choose; 0 where no K pays."""
    return max(range(longest + 1), key=lambda k: speed_up(alpha, k, c))
