"""Caches of states of other shapes, dtypes and kinds than keys and values alike: each goes where its row goes."""

import pytest
import torch
from trt_spec.engines import (
    BLOCK_TOKENS,
    MOST_SLOTS,
    RECURRENT,
    ROW,
    WIDEST_STEP,
    WINDOW,
    Contract,
    RequestError,
    State,
    keys_and_values,
)
from trt_spec.runtime.memory.block_cache import BlockCache
from trt_spec.runtime.memory.budget import tokens_in
from trt_spec.runtime.memory.cache import KVCache
from trt_spec.runtime.memory.row_cache import RowCache

KEYS = (State("key_0", (2, 4), "float32"), State("value_0", (2, 6), "float32"))
FEATURES, SUMMARY = State("features", (1, 8), "bfloat16"), State("summary", (3,), "float32", ROW)
TOKENS_ONLY = Contract(1, 2, (*KEYS, FEATURES), vocab_size=8, max_length=256, dtype="float32")
EVERYTHING = Contract(1, 2, (*KEYS, FEATURES, SUMMARY), vocab_size=8, max_length=256, dtype="float32")
ALONE = Contract(
    0,
    0,
    (SUMMARY, State("inputs_0", (1, 2), "float32", WINDOW)),
    vocab_size=8,
    max_length=10**6,
    dtype="float32",
    capabilities=(RECURRENT,),
)
MIXED = Contract(
    1,
    2,
    (*KEYS, *ALONE.states),
    vocab_size=8,
    max_length=1024,
    dtype="float32",
    capabilities=(RECURRENT,),
)
ROWS = 3


def filled(cache: KVCache, lengths: list[int]) -> list[dict[str, torch.Tensor]]:
    """Let each row hold random values; what it holds, row by row."""
    cache.make_room(0, [0] * len(lengths), [max(lengths)] * len(lengths))
    random = torch.manual_seed(0)
    for buffer in cache.buffers.values():
        buffer.copy_(torch.randn(buffer.shape, generator=random))
    for row, length in enumerate(lengths):
        cache.wrote(row, 0, length)
    return [held(cache, row) for row in range(len(lengths))]


def held(cache: KVCache, row: int) -> dict[str, torch.Tensor]:
    contract = cache.contract
    found = {name: cache.read(row, name)[:, : cache.entries[row]].clone() for name in contract.cache_names}
    return found | {state.name: cache.buffers[state.name][row].clone() for state in contract.of_kind(ROW)}


def require(cache: KVCache, row: int, expected: dict[str, torch.Tensor]) -> None:
    found = held(cache, row)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name], values), name


def caches() -> list[KVCache]:
    blocks = BlockCache(TOKENS_ONLY.with_blocks(), "cpu", ROWS, 128)
    return [RowCache(EVERYTHING, "cpu", ROWS), RowCache(EVERYTHING, "cpu", ROWS, ROWS, 128, fixed=True), blocks]


@pytest.mark.parametrize("cache", caches(), ids=["rows", "rows of full capacity", "blocks"])
def test_every_state_moves_and_changes_places_with_its_row(cache: KVCache):
    cache.clear()
    first, _, third = filled(cache, [5, 40, 33])
    cache.swap(0, 2)
    require(cache, 0, third)
    require(cache, 2, first)
    cache.free(1)
    cache.move(2, 1)
    require(cache, 1, first)
    assert cache.entries == [33, 5, 0]
    cache.move(2, 0)
    assert cache.entries == [0, 5, 0], "a row that holds nothing moves as well"
    require(cache, 1, first)


def test_where_states_stand_goes_with_their_row():
    """Which tokens they have absorbed, and which slots hold what was read since."""
    cache = RowCache(ALONE, "cpu", ROWS)
    places = cache.recurrence
    for row, (base, slot) in enumerate([(5, 0), (40, 8), (33, 8)]):
        cache.make_room(row, [0], [base])
        cache.wrote(row, 0, base, absorbed=base)
        places.base[row], places.slot[row] = base, slot
    cache.swap(0, 2)
    assert (places.base.tolist(), places.slot.tolist(), cache.bases) == ([33, 40, 5], [8, 8, 0], [33, 40, 5])
    cache.move(2, 1)
    assert (places.base.tolist(), places.slot.tolist(), cache.bases) == ([33, 5, 0], [8, 0, 0], [33, 5, 0])


def test_buffers_that_grow_keep_every_state():
    cache = RowCache(EVERYTHING, "cpu", 8)
    before = filled(cache, [5, 40, 33])
    cache.fit(8, 120)
    for row, expected in enumerate(before):
        require(cache, row, expected)


def test_a_row_that_holds_nothing_begins_with_states_of_zeros():
    cache = RowCache(EVERYTHING, "cpu", ROWS)
    filled(cache, [5, 40, 33])
    cache.move(2, 0)
    cache.free(1)
    summary = cache.buffers["summary"]
    assert summary[0].abs().min() > 0
    assert not summary[1:ROWS].any()
    cache.clear()
    assert not summary[:ROWS].any()


def test_the_entries_of_a_path_move_in_every_state_of_tokens_and_in_no_other():
    cache = RowCache(EVERYTHING, "cpu", 2)
    before = filled(cache, [20, 20])
    cache.straighten(torch.tensor([10, 12]), torch.tensor([[0, 2, 5], [0, 1, 3]]))
    for row, (start, path) in enumerate([(10, [0, 2, 5]), (12, [0, 1, 3])]):
        for name in EVERYTHING.cache_names:
            order = [*range(start), *(start + node for node in path), *range(start + 3, 20)]
            before[row][name] = before[row][name][:, order]
        require(cache, row, before[row])


@pytest.mark.parametrize("in_blocks", [False, True])
def test_kept_blocks_hold_every_state_of_tokens(in_blocks: bool):
    contract = TOKENS_ONLY.with_blocks() if in_blocks else TOKENS_ONLY
    cache: KVCache
    if in_blocks:
        cache = BlockCache(contract, "cpu", ROWS, 128, kept_blocks=2)
    else:
        cache = RowCache(contract, "cpu", ROWS, kept_blocks=2)
    [first, *_] = filled(cache, [70, 3])
    kept = [cache.keep(0, place) for place in range(2)]
    cache.free(0)
    cache.reuse(2, kept)
    require(cache, 2, {name: entries[:, : 2 * BLOCK_TOKENS] for name, entries in first.items()})


def test_no_call_may_begin_below_what_a_row_has_absorbed():
    """A state of a row cannot be taken back."""
    cache = RowCache(EVERYTHING, "cpu", ROWS)
    for begin, end in ((0, 10), (9, 12), (12, 13)):
        cache.wrote(0, begin, end)
    with pytest.raises(AssertionError, match="row 0 holds 12 tokens, not 11"):
        cache.wrote(0, 11, 12)
    cache.free(0)
    cache.wrote(0, 0, 1)
    plain = RowCache(TOKENS_ONLY, "cpu", ROWS)
    plain.wrote(0, 0, 12)
    plain.wrote(0, 3, 4)
    assert plain.entries[0] == 4, "entries of tokens can"


def test_states_alike_lie_in_one_tensor():
    """So an ordinary model moves a row in one operation."""
    ordinary = Contract(3, 2, keys_and_values(3, 2, 4, "float32"), vocab_size=8, max_length=256, dtype="float32")
    assert [list(one.shape) for one in RowCache(ordinary, "cpu", 2, 2, 64).memory.tokens] == [[6, 2, 2, 64, 4]]
    memory = RowCache(EVERYTHING, "cpu", 2, 2, 64).memory
    assert [list(one.shape) for one in memory.tokens] == [[1, 2, 2, 64, 4], [1, 2, 2, 64, 6], [1, 2, 1, 64, 8]]
    assert [list(one.shape) for one in memory.rows] == [[1, 2, 3]]


def test_where_no_token_takes_memory_a_cache_grows_with_its_rows_alone_and_a_budget_is_for_the_widest_rounds():
    each = 4 * (3 + MOST_SLOTS * 2)
    assert tokens_in([ALONE], ROWS * each, "cache_bytes", rows=ROWS) is None
    assert tokens_in([ALONE], ROWS * each - 1, "cache_bytes", rows=ROWS) == 0
    assert tokens_in([ALONE, TOKENS_ONLY], each + 100 * 96, "cache_bytes", rows=1) == 100
    assert not RowCache(ALONE, "cpu", ROWS, most_tokens=0).holds([1])
    cache = RowCache(ALONE, "cpu", ROWS, most_tokens=1)
    assert cache.holds(ROWS * [10**6], widest=WIDEST_STEP)
    cache.fit(ROWS, 10)
    cache.make_slots(WIDEST_STEP)
    assert sum(buffer.nbytes for buffer in cache.buffers.values()) <= ROWS * each
    before = cache.version
    cache.fit(ROWS, 10**6)
    assert cache.version == before, "its memory is where it was"


def test_slots_that_a_budget_has_no_room_for_take_that_of_entries_that_nobody_needs():
    """Rows keep what they hold, the longest of them too."""
    cache = RowCache(MIXED, "cpu", 2, 2, 512, most_tokens=2 * 512)
    before = filled(cache, [10, 200])
    cache.make_slots(WIDEST_STEP)
    assert 200 <= cache.capacity < 512
    for row, expected in enumerate(before):
        require(cache, row, expected)


def test_a_budget_sets_aside_what_rows_take_beside_their_tokens():
    per_token = 4 * 2 * 4 + 4 * 2 * 6 + 2 * 8
    assert tokens_in([EVERYTHING, TOKENS_ONLY], 1000 * per_token, "cache_bytes") == 500
    assert tokens_in([EVERYTHING], 100 * per_token + 5 * 12, "cache_bytes", rows=5) == 100
    assert tokens_in([EVERYTHING], 10, "cache_bytes", rows=5) == 0
    with pytest.raises(RequestError, match="cache_bytes is 0, expected a positive whole number"):
        tokens_in([EVERYTHING], 0, "cache_bytes", rows=5)
