"""Rows keep what there is of their sources through moves, swaps, and memory that grows and shrinks."""

import random

import pytest
import torch
from trt_spec.engines import GRANULE, SOURCES, Contract, keys_and_values, source_states
from trt_spec.runtime.memory.full import CacheFull
from trt_spec.runtime.memory.row_cache import RowCache

ROWS, LONGEST = 6, 300
STATES = (*keys_and_values(2, 2, 3, "float32"), *source_states(2, 2, 3, "float32"))
CONTRACT = Contract(2, 2, STATES, vocab_size=64, max_length=256, dtype="float32", capabilities=(SOURCES,))


def made(entries: int, mark: float) -> list[torch.Tensor]:
    return [torch.full((2, entries, 3), mark + place / 8) for place in range(4)]


def assert_holds(cache: RowCache, row: int, entries: int, mark: float) -> None:
    tensors = cache.tensors(row, 1)
    assert tensors["source_length"].tolist() == [entries]
    for place, state in enumerate(source_states(2, 2, 3, "float32")):
        found = tensors[state.name][0]
        assert found.isfinite().all()
        if entries:
            assert (found[:, :entries] == mark + place / 8).all()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("fixed", [False, True])
def test_a_row_has_its_own_source_wherever_it_moves(seed: int, fixed: bool) -> None:
    choose = random.Random(seed)
    cache = RowCache(CONTRACT, "cpu", ROWS, ROWS, 256, fixed=fixed, longest_source=LONGEST)
    assert cache.sources is not None
    held: dict[int, tuple[int, float]] = {}
    for turn in range(200):
        row, other = choose.sample(range(ROWS), 2)
        match choose.choice(["put", "put", "move", "swap", "free"]):
            case "put":
                held[row] = choose.randint(1, LONGEST), float(turn)
                cache.free(row)
                cache.sources.put(row, made(*held[row]))
            case "move" if row in held:
                held[other] = held.pop(row)
                cache.move(row, other)
            case "swap":
                cache.swap(row, other)
                ours, theirs = held.pop(row, None), held.pop(other, None)
                held |= {place: one for place, one in ((other, ours), (row, theirs)) if one is not None}
            case "free":
                held.pop(row, None)
                cache.free(row)
        cache.make_room(0, [0] * ROWS, [1] * ROWS)
        for each in range(ROWS):
            assert_holds(cache, each, *held.get(each, (0, 0.0)))


def test_memory_is_hardly_longer_than_the_longest_source_and_steps_over_the_old_are_void() -> None:
    cache = RowCache(CONTRACT, "cpu", ROWS, longest_source=LONGEST)
    assert cache.sources is not None
    sizes, version = [], cache.version
    for row, entries in enumerate([5, 200, LONGEST]):
        cache.sources.put(row, made(entries, 1.0))
        sizes.append(cache.sources.capacity)
        assert cache.version > version
        version = cache.version
    assert sizes == [GRANULE, -(-200 // GRANULE) * GRANULE, LONGEST]
    cache.free(1)
    cache.free(2)
    cache.make_room(0, [0], [1])
    assert cache.sources.capacity == GRANULE
    assert_holds(cache, 0, 5, 1.0)


def test_where_no_memory_is_left_it_says_so_and_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = RowCache(CONTRACT, "cpu", ROWS, longest_source=LONGEST)
    assert cache.sources is not None
    cache.sources.put(0, made(5, 1.0))

    def none_left(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("not enough memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", none_left)
        with pytest.raises(CacheFull, match="no memory for 4 sources of 300 entries"):
            cache.sources.put(2, made(320, 2.0))
    assert_holds(cache, 0, 5, 1.0)
    cache.sources.put(1, made(9, 3.0))
    assert_holds(cache, 1, 9, 3.0)


def test_it_takes_no_more_rows_than_there_are() -> None:
    cache = RowCache(CONTRACT, "cpu", ROWS, longest_source=LONGEST)
    assert cache.sources is not None
    cache.sources.fit(5, 5)
    assert cache.sources.rows == ROWS
