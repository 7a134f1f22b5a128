"""The drafter of requests that name none. It needs no torch, so that flags are refused before that is loaded."""

from collections.abc import Collection

from ...engines import Bundle
from .asked import DRAFTER_NAMES


def usual_drafter(bundle: Bundle, open_here: Collection[str] = DRAFTER_NAMES) -> str:
    """Return the drafter of requests that name none; not every engine runs look-aheads."""
    if bundle.drafts:
        return "model" if bundle.models[bundle.drafts[0]].masks is None else "pard"
    if bundle.foreign is not None and not bundle.heads:
        tokens = bundle.models[bundle.foreign].tokens
        assert tokens is not None
        return tokens.drafter
    looks_ahead = bundle.target.look_aheads and "pass" in open_here
    return next(iter(bundle.heads), "pass" if looks_ahead else "lookup")
