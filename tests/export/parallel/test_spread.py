"""What is spread over shards stays known when it gets another shape."""

import pytest
from trt_spec.export.parallel.spread import InUnits, Part, Spread, Whole, reshaped

SEED = frozenset([("q_proj", 0)])


def columns(size: int, axis: int = 2) -> Spread:
    return Spread(axis, (Part(size, size),), SEED)


def test_columns_become_heads_and_heads_columns() -> None:
    heads = reshaped(columns(64), (11, 13, 64), (11, 13, 8, 8), shards=4)
    assert (heads.axis, heads.share(4)) == (2, 2)
    assert reshaped(heads, (11, 13, 8, 8), (11, 13, 64), shards=4) == Spread(2, (Part(64, 8),), SEED)


def test_fewer_heads_than_shards_are_shared_by_neighbours() -> None:
    with pytest.raises(InUnits) as asked:
        reshaped(columns(16), (11, 13, 16), (11, 13, 2, 8), shards=4)
    part = Part(16, asked.value.units)
    assert [part.begin(rank, 4) for rank in range(4)] == [0, 0, 8, 8]
    assert reshaped(Spread(2, (part,), SEED), (11, 13, 16), (11, 13, 2, 8), shards=4).twice(4)


def test_heads_that_do_not_divide_among_shards_stay_whole() -> None:
    with pytest.raises(Whole):
        reshaped(columns(24), (11, 13, 24), (11, 13, 3, 8), shards=2)


def test_rows_are_not_folded_with_what_is_spread() -> None:
    with pytest.raises(Whole):
        reshaped(columns(64), (11, 13, 64), (11, 832), shards=2)
