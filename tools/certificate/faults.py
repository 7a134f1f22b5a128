"""Classic faults of speculative decoding, planted in the code that runs: a certificate is worth what it catches."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ...runtime.acceptance import accept as acceptance
from ...runtime.acceptance.filters import Cut
from ...runtime.acceptance.transform import transform
from ...runtime.round import round as round_
from ...runtime.round.propose import propose
from ...runtime.state.indexing import pick


@contextmanager
def planted(*swaps: tuple[Any, str, Any]) -> Iterator[None]:
    """Each (owner, name, value) for as long as the block runs. Open decoders in it, and let them record no rounds."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in swaps]
    for owner, name, value in swaps:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def unfiltered(logits: Any, rows: Any, plan: Any, ahead: Any) -> Any:
    """Pitfall 3."""
    changes = tuple(one for one in plan.filters if not isinstance(one, Cut))
    return transform(logits, rows, replace(plan, filters=changes), ahead)


def half_of_q(*arguments: Any) -> Any:
    """Pitfall 2: q is not what the draft sampled from."""
    proposal = propose(*arguments)
    q, frame = proposal.probabilities, arguments[2]
    if q is None:
        q = torch.zeros_like(frame.target_logits[:, :-1]).scatter_(2, proposal.tokens[:, :, None], 1.0)
    return proposal._replace(probabilities=q / 2)


def p_itself(proposal: Any, target: Any, accepted: Any, *_: Any) -> Any:
    """The token after a rejection is drawn from p."""
    return pick(target, accepted)


SWAPS: dict[str, tuple[tuple[Any, str, Any], ...]] = {
    "wrongly declared q": ((round_, "propose", half_of_q),),
    "filter on one side only": ((round_, "transform", unfiltered),),
    "skipped residual": ((acceptance, "residual", p_itself),),
}


def fault(name: str) -> Any:
    """A context in which the fault of this name is in the code."""
    return planted(*SWAPS[name])
