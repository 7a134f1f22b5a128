"""Copying drafters are asked without a decoder around them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from hypothesis import strategies as st
from trt_spec.runtime import SamplingParams
from trt_spec.runtime.drafters import Resources
from trt_spec.runtime.drafters.lookup import look_up as copy_by_lookup
from trt_spec.runtime.drafters.suffix import Suffix

from ..runtime.states import make_plan, make_rows

TEXTS = st.lists(st.integers(0, 2), max_size=60)
GREEDY = SamplingParams()


def look_up(*contexts: list[int], k: int = 3, copy: int = 0, sources: Sequence[list[int]] = ()) -> list[list[int]]:
    """The proposals of each row, of the best copy or a further one; an empty list where nothing matches."""
    params = [SamplingParams()] * len(contexts)
    rows = make_rows(params, 100, contexts)
    for row, source in enumerate(sources):
        rows.note_source(row, contexts[row][:1], source)
    span = max(map(len, contexts))
    copied, found = copy_by_lookup(rows, make_plan(params, k), span, copy + 1)[copy]
    return [tokens if one else [] for tokens, one in zip(copied.tolist(), found.tolist(), strict=True)]


@dataclass(eq=False)
class Asking:
    prompt: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    params: SamplingParams = GREEDY
    prediction: tuple[int, ...] = ()


def suffix_drafter(*ended: Asking) -> Suffix:
    """A drafter of its own, which has seen these requests end."""
    target = SimpleNamespace(engine=SimpleNamespace(device="cpu"))
    drafter = Suffix(0, Resources(None, target, {}, max_batch=1))
    for one in ended:
        drafter.suggest(one, 0)
        drafter.ended(one)
    return drafter
