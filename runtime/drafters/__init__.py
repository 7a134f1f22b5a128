"""The drafters, one per file; to add one, write a file and add a row to this table."""

from ...engines.bundle import DRAFTS
from ..state.asked import DRAFTER_NAMES, usual_drafter
from .cascade import Cascade
from .common import Common
from .drafter import Copier, Drafter, Offer, Resources, Sampler
from .foreign_draft import ForeignDraft
from .head import Blockwise, Eagle3, Medusa, Mtp
from .look_aheads import Pass
from .lookup import Lookup
from .masked import DFlash, DSpark, Pard, PEagle
from .model import DraftModel, further_draft
from .ngram import NGram
from .random import Random
from .suffix import Suffix
from .text import Text

DRAFTERS: dict[str, type[Drafter]] = {one.name: one for one in (DraftModel, Common, Text)}
DRAFTERS |= {one.name: one for one in (Lookup, Suffix, NGram, Random, Cascade)}
DRAFTERS |= {one.name: one for one in (Eagle3, Mtp, PEagle, DFlash, DSpark, Medusa, Blockwise, Pard, Pass)}
DRAFTERS |= {one.name: one for one in map(further_draft, range(2, len(DRAFTS) + 1))}  # model2, model3, …
assert tuple(DRAFTERS) == DRAFTER_NAMES
[PREDICTING] = (name for name, kind in DRAFTERS.items() if kind.copies_predictions)


def open_drafters(resources: Resources) -> tuple[dict[str, Drafter], dict[str, str]]:
    """Open the drafters that a decoder can have, by name; also return why it cannot have the others."""
    reasons = {name: kind.unavailable(resources) for name, kind in DRAFTERS.items()}
    able = [kind for name, kind in DRAFTERS.items() if reasons[name] is None]
    return {kind.name: kind(place, resources) for place, kind in enumerate(able)}, {
        name: reason for name, reason in reasons.items() if reason is not None
    }


__all__ = [
    "DRAFTERS",
    "PREDICTING",
    "Copier",
    "Drafter",
    "ForeignDraft",
    "Offer",
    "Resources",
    "Sampler",
    "open_drafters",
    "usual_drafter",
]
