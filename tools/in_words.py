"""Settings and results in words."""

from typing import Any

from ..engines import Bundle
from ..engines.errors import counted
from ..runtime import EntropyRule, Speculation
from ..runtime.state.asked import BESIDE, DraftLength


def draft_of(bundle: Bundle, drafter: str) -> str | None:
    """The names of the draft models that a drafter runs, or of the first one; None if the bundle has none."""
    from ..runtime.drafters import DRAFTERS

    kinds = [DRAFTERS[name] for name in drafter.split(BESIDE) if name in DRAFTERS]
    run = [name for kind in kinds if (name := kind.model_name(bundle)) is not None] or bundle.drafts[:1]
    return " and ".join(bundle.models[name].name for name in run) or None


def source_of_proposals(drafter: str, draft: str | None) -> str:
    """Name the source of proposals; `draft` is the answer of `draft_of`."""
    from ..runtime.drafters import DRAFTERS
    from ..runtime.drafters.drafter import Drafter

    if drafter == "none":
        return "no draft"
    return DRAFTERS.get(drafter, Drafter).in_words.format(name=drafter, draft=draft)


def length_of_drafts(draft_length: DraftLength) -> str:
    """Say how many tokens a round proposes."""
    if isinstance(draft_length, EntropyRule):
        return f"K from {draft_length.shortest} to {draft_length.longest} by the draft's entropy"
    return f"{'K + M' if '+' in str(draft_length) else 'K'} = {draft_length}"


def pair(result: dict[str, Any]) -> str:
    """Name the models that bench measured."""
    return f"{result['target']} with {source_of_proposals(result['drafter'], result['draft'])}"


def place(result: dict[str, Any]) -> str:
    """Name the engine, device and machine that bench measured on."""
    machine = result["conditions"]["machine"]
    on = ", ".join(machine["gpus"]) if result["device"].startswith("cuda") else _cores(machine["cpu"])
    return f"{result['engine']} on {result['device']} ({on}), batch {result['batch']}"


def _cores(cpu: dict[str, Any]) -> str:
    return f"{cpu['model']}, {counted(cpu['cores'], 'core')}"


def summary(speculation: Speculation) -> str:
    """State the acceptance and the tokens per round."""
    acceptance = speculation.acceptance
    proposals = "nothing proposed" if acceptance is None else f"{acceptance:.0%} of examined proposals accepted"
    return f"{proposals}, {speculation.tokens_per_round or 0:.2f} tokens a round"


def on_device(length: object, setting: dict[str, Any]) -> str:
    """State how the device ran the rounds of a setting that bench measured."""
    found = setting["on_device"]
    kernels = "" if found["kernels_per_round"] is None else f", {found['kernels_per_round']:,.0f} kernels a round"
    return (
        f"K = {length}: {found['replayed_share']:.0%} of rounds replayed{kernels}, {found['gap_ms']:.3f} ms of "
        f"{setting['round_ms']:.3f} between them"
    )


def lossy(lenience: float) -> str:
    """Warn about a result that was made with lenience."""
    return f"lossy: with lenience {lenience:g} the output is not distributed as the target's own"
