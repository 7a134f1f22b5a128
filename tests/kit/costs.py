"""Tables of costs are made up, as if a bundle had been tuned."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from unittest.mock import patch

from trt_spec.runtime.lengths.costs import Costs
from trt_spec.runtime.state.shapes import read_shape

LENGTHS = (0, 1, 2, 4, 8)
SIBLINGS = {1: 0.3, 2: 0.5}  # how often one of them stands where its line falls
BESIDE = SIBLINGS | {"4/8": 0.8}  # and how many tokens of a tree's branches


def table(
    batches: Sequence[int] = (1, 8),
    draft_lengths: Sequence[int] = LENGTHS,
    acceptance: float = 0.5,
    beside: Mapping[int | str, float] | None = None,
    each_ms: float = 0.02,
    reading_ms: Mapping[str, tuple[float, float]] | None = None,
    **round_ms: Sequence[Sequence[float]],
) -> Costs:
    """A round of one row takes a millisecond and .2 for each draft step; a copy costs .05, a sibling or branch .02."""
    tables = round_ms or {
        name: [[1.0 + step * k * batch for k in draft_lengths] for batch in batches]
        for name, step in (("model", 0.2), ("lookup", 0.05), ("suffix", 0.05))
    }
    return Costs(
        engine="onnxruntime",
        device="cpu",
        machine="this one",
        models={},
        batches=tuple(batches),
        draft_lengths=tuple(draft_lengths),
        round_ms={name: tuple(map(tuple, times)) for name, times in tables.items()},
        acceptance=dict.fromkeys(tables, acceptance),
        proposing=dict.fromkeys(tables, 1.0),
        beside=tuple(beside or ()),
        beside_ms={"model": (tuple(each_ms * beyond(one) for one in beside),) * len(batches)} if beside else {},
        beside_tokens={"model": tuple(beside.values())} if beside else {},
        reading_ms=dict(reading_ms or {}),
    )


def beyond(shape: int | str) -> int:
    return shape if isinstance(shape, int) else read_shape(shape).beyond


@contextmanager
def known_costs(costs: Costs | None = None) -> Iterator[None]:
    """As if a bundle had been tuned."""
    found = costs or table(beside=BESIDE)
    readers = [f"trt_spec.{place}.read_costs" for place in ("runtime.decoder", "tools.flags.controller")]
    with patch(readers[0], return_value=found), patch(readers[1], return_value=found):
        yield
