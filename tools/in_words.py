"""What must be said of a result, in words."""

from ..runtime import Speculation


def summary(speculation: Speculation) -> str:
    """Acceptance and tokens per round in words."""
    acceptance = speculation.acceptance
    proposals = "nothing proposed" if acceptance is None else f"{acceptance:.0%} of examined proposals accepted"
    return f"{proposals}, {speculation.tokens_per_round or 0:.2f} tokens a round"


def lossy(lenience: float) -> str:
    """What must be said of a result under lenience."""
    return f"lossy: with lenience {lenience:g} the output is not distributed as the target's own"
