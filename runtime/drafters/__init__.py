"""The sources of proposals, one drafter per file; to add one, write a file and add a row to this table."""

from ...engines.bundle import DRAFTS
from ..state.noise import MOST_LINES
from .cascade import Cascade
from .drafter import Copier, Drafter, Offer, Resources, Sampler
from .lookup import Lookup, further_lookup
from .model import DraftModel, further_draft
from .ngram import NGram
from .random import Random
from .suffix import Suffix, further_suffix

DRAFTERS: dict[str, type[Drafter]] = {one.name: one for one in (DraftModel, Lookup, Suffix, NGram, Random, Cascade)}
DRAFTERS |= {one.name: one for one in map(further_draft, range(2, len(DRAFTS) + 1))}  # model2, model3, …
CONTINUATIONS: dict[str, type[Drafter]] = {  # lookup2, suffix2, …: they have lines beside those before them only
    one.name: one for number in range(2, MOST_LINES + 1) for one in (further_lookup(number), further_suffix(number))
}
NONE = "none"  # the name that means no drafter


def open_drafters(resources: Resources) -> tuple[dict[str, Drafter], dict[str, str]]:
    """Open the drafters that a decoder can have, by name; also return why it cannot have the others."""
    kinds = DRAFTERS | CONTINUATIONS
    reasons = {name: kind.unavailable(resources) for name, kind in kinds.items()}
    for place, kind in enumerate(kind for name, kind in kinds.items() if reasons[name] is None):
        resources.opened[kind.name] = kind(place, resources)
    return resources.opened, {name: reason for name, reason in reasons.items() if reason is not None}


__all__ = ["CONTINUATIONS", "DRAFTERS", "NONE", "Copier", "Drafter", "Offer", "Resources", "Sampler", "open_drafters"]
