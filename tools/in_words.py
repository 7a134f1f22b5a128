"""What must be said of a setting and of a result, in words."""

from typing import Any

from ..runtime import EntropyRule, Speculation


def source_of_proposals(drafter: str, draft: str | None) -> str:
    """`draft` is the name of the bundle's draft model."""
    if drafter == "none":
        return "no draft"
    if drafter == "model":
        return f"draft {draft}"
    return f"lookup and draft {draft} in cascade" if drafter == "cascade" else f"proposals by {drafter}"


def length_of_drafts(draft_length: int | str | EntropyRule) -> str:
    if isinstance(draft_length, EntropyRule):
        return f"K from {draft_length.shortest} to {draft_length.longest} by the draft's entropy"
    return f"K = {draft_length}"


def pair(result: dict[str, Any]) -> str:
    """Which models bench measured."""
    return f"{result['target']} with {source_of_proposals(result['drafter'], result['draft'])}"


def place(result: dict[str, Any]) -> str:
    """Where bench measured them."""
    machine = result["conditions"]["machine"]
    on = ", ".join(machine["gpus"]) if result["device"].startswith("cuda") else _cores(machine["cpu"])
    return f"{result['engine']} on {result['device']} ({on}), batch {result['batch']}"


def _cores(cpu: dict[str, Any]) -> str:
    return f"{cpu['model']}, {cpu['cores']} core{'s' if cpu['cores'] > 1 else ''}"


def summary(speculation: Speculation) -> str:
    """Acceptance and tokens per round."""
    acceptance = speculation.acceptance
    proposals = "nothing proposed" if acceptance is None else f"{acceptance:.0%} of examined proposals accepted"
    return f"{proposals}, {speculation.tokens_per_round or 0:.2f} tokens a round"


def lossy(lenience: float) -> str:
    """What a result under lenience must say."""
    return f"lossy: with lenience {lenience:g} the output is not distributed as the target's own"
