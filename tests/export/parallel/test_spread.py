"""What is spread over shards stays known when it gets another shape."""

from itertools import pairwise
from math import prod

import pytest
import torch
from torch import Tensor
from trt_spec.export.parallel.spread import InParts, InUnits, Part, Spread, Whole, reshaped

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


def held(value: Tensor, spread: Spread, rank: int) -> Tensor:
    """What one of two shards has of a value."""
    blocks, begin, pieces = value.unflatten(spread.axis, (spread.blocks, -1)), 0, []
    for part in spread.parts:
        pieces.append(blocks.narrow(spread.axis + 1, begin + part.begin(rank, 2), part.share(2)))
        begin += part.size
    return torch.cat(pieces, spread.axis + 1).flatten(spread.axis, spread.axis + 1)


@pytest.mark.parametrize(
    ("spread", "shapes"),
    [
        (columns(24), [(3, 5, 24), (3, 5, 4, 6), (60, 6), (3, 5, 4, 6), (3, 5, 24)]),  # heads as rows, and back
        (columns(24), [(3, 5, 24), (15, 24), (15, 4, 6), (60, 6), (3, 20, 6), (3, 5, 24)]),
        (Spread(2, (Part(8, 8),) * 3, SEED), [(3, 5, 24), (3, 5, 3, 4, 2), (3, 5, 3, 8)]),  # queries, keys and values
        (Spread(2, (Part(2, 2), Part(4, 4)), SEED), [(3, 5, 6, 2), (3, 5, 12), (3, 60), (3, 5, 12)]),
    ],
)
def test_each_shard_reshapes_what_it_has_alone(spread: Spread, shapes: list[tuple[int, ...]]) -> None:
    value, [first, *others] = torch.arange(prod(shapes[0])), shapes
    own = [held(value.view(first), spread, rank) for rank in range(2)]
    for before, after in pairwise([first, *others]):
        spread = reshaped(spread, before, after, shards=2)
        own = [each.reshape(spread.local(after, 2)) for each in own]
        for rank in range(2):
            assert torch.equal(own[rank], held(value.view(after), spread, rank))


def test_a_matrix_of_queries_keys_and_values_is_spread_by_each() -> None:
    with pytest.raises(InParts) as asked:
        reshaped(columns(24), (3, 5, 24), (3, 5, 3, 4, 2), shards=2)
    assert asked.value.sizes == (8, 8, 8)
