"""What each drafter runs of a bundle, and what a bundle lacks that it needs, as the manifest says without torch."""

from collections.abc import Callable
from functools import partial

from ...engines import Bundle
from ...engines.bundle import DRAFTS, NGRAMS

HEADS = ("eagle3", "mtp", "peagle", "dflash", "dspark", "medusa", "blockwise")
FURTHER = {f"model{number}": number - 1 for number in range(2, len(DRAFTS) + 1)}  # which of the bundle's drafts


def comes_by_export(drafter: str) -> bool:
    """Whether a drafter needs what is exported beside a target."""
    return drafter != "ngram" and (drafter in MODELS or drafter in OTHER_NEEDS)


def model_of(drafter: str, bundle: Bundle) -> str | None:
    """Return the name of the bundle's model that a drafter runs; None if it runs none, or the bundle has none."""
    return MODELS[drafter](bundle) if drafter in MODELS else None


def lack(drafter: str, bundle: Bundle) -> str | None:
    """Say what a bundle lacks that a drafter needs; None if it lacks nothing."""
    if drafter in MODELS:
        return None if model_of(drafter, bundle) else _no_model(drafter, bundle)
    return OTHER_NEEDS[drafter](bundle) if drafter in OTHER_NEEDS else None


def ngram_file(bundle: Bundle) -> str | None:
    """Return the name of the bundle's table of n-grams, if it has one."""
    return next((name for name in bundle.files if name.startswith(f"{NGRAMS}/")), None)


def _draft(place: int, bundle: Bundle) -> str | None:
    return bundle.drafts[place] if place < len(bundle.drafts) else None


def _masked(bundle: Bundle) -> str | None:
    return next((name for name in bundle.drafts if bundle.models[name].masks is not None), None)


def _head(name: str, bundle: Bundle) -> str | None:
    return name if name in bundle.heads else None


MODELS: dict[str, Callable[[Bundle], str | None]] = {
    "model": partial(_draft, 0),
    "cascade": partial(_draft, 0),
    "pard": _masked,
    **{name: partial(_head, name) for name in HEADS},
    **{name: partial(_draft, place) for name, place in FURTHER.items()},
}


def _no_model(drafter: str, bundle: Bundle) -> str:
    if drafter in HEADS:
        return f"the bundle has no {drafter} head; export one with --draft, or use drafter lookup or none"
    if drafter == "pard":
        return "the bundle has no draft that reads masks, as PARD trains them; use drafter model, lookup or none"
    if not bundle.drafts:
        return "the bundle has no draft model; use drafter lookup or none"
    return (
        f"the bundle has no {DRAFTS[FURTHER[drafter]]}, which drafter {drafter} runs; use drafter model, or "
        "export with more --draft"
    )


def _no_ngrams(bundle: Bundle) -> str | None:
    if ngram_file(bundle):
        return None
    return f"the bundle has no table of n-grams; count one with trt-spec ngram --bundle {bundle.path} --text FILE"


def _no_look_aheads(bundle: Bundle) -> str | None:
    if bundle.target.look_aheads:
        return None
    return "the bundle has no look-aheads of PaSS; export them with --draft, or use drafter lookup or none"


def _no_foreign(drafter: str, bundle: Bundle) -> str | None:
    if bundle.foreign is not None:
        return None
    return (
        f"the bundle has no draft with tokens of its own, which drafter {drafter} runs; export one with --draft, or "
        "use drafter model, lookup or none"
    )


OTHER_NEEDS: dict[str, Callable[[Bundle], str | None]] = {
    "ngram": _no_ngrams,
    "pass": _no_look_aheads,
    **{name: partial(_no_foreign, name) for name in ("common", "text")},
}
