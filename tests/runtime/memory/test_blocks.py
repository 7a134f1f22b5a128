"""A cache in blocks: rows own just the blocks that they need, and whatever requests do, none is lost or owned twice."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trt_spec.engines import (
    BLOCK_TOKENS,
    MAX_DRAFT_LENGTH,
    SPARE_BLOCK,
    Contract,
    EngineError,
    RequestError,
    keys_and_values,
)
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.memory.block_cache import BlockCache, BlockPool
from trt_spec.runtime.memory.row_cache import RowCache

from ...kit.bundles import Pair

ROWS, CAPACITY = 4, 320
IN_ROWS = Contract(1, 2, keys_and_values(1, 1, 4, "float32"), 16, 256, "float32")
CONTRACT = IN_ROWS.with_blocks()


def block_cache(most_tokens: int | None = None) -> BlockCache:
    return BlockCache(CONTRACT, "cpu", ROWS, CAPACITY, most_tokens)


def blocks_of(cache: BlockCache, row: int) -> list[int]:
    return [block for block in cache.table[row].tolist() if block != SPARE_BLOCK]


def require_no_leak(cache: BlockCache) -> None:
    """Each block is free, or in just one row of the table; and the places before it in that row are taken, too."""
    owned = [blocks_of(cache, row) for row in range(len(cache.table))]
    for row, blocks in enumerate(owned):
        assert cache.table[row, : len(blocks)].tolist() == blocks
    every = [block for blocks in owned for block in blocks]
    assert len(set(every)) == len(every) == cache.pool.used
    assert cache.pool.used + cache.pool.free == cache.pool.size - 1


# The cache.


def test_a_row_owns_the_blocks_that_its_entries_fill():
    cache = block_cache()
    for start, width, blocks in ((0, 1, 1), (0, 32, 1), (32, 1, 2), (31, 2, 2), (300, 17, 10), (10, 1, 1)):
        cache.make_room(0, [start], [width])
        assert len(blocks_of(cache, 0)) == blocks
    cache.entries[0] = 70
    cache.make_room(0, [10], [1])
    assert len(blocks_of(cache, 0)) == 3, "a block with valid entries is kept"
    cache.free(0)
    assert cache.pool.used == 0


def test_a_moved_row_moves_its_table_and_not_its_bytes():
    cache = block_cache()
    cache.make_room(0, [0, 0], [40, 70])
    cache.entries[:2] = 40, 70
    for buffer in cache.buffers.values():
        buffer.copy_(torch.randn_like(buffer))
    owned, before = blocks_of(cache, 1), cache.read(1, "key_0").clone()
    memory = {name: buffer.clone() for name, buffer in cache.buffers.items()}
    cache.move(1, 0)
    assert blocks_of(cache, 0) == owned
    assert cache.entries == [70, 0, 0, 0]
    torch.testing.assert_close(cache.read(0, "key_0"), before, rtol=0, atol=0)
    for name, buffer in cache.buffers.items():
        torch.testing.assert_close(buffer, memory[name], rtol=0, atol=0)
    require_no_leak(cache)


def test_a_pool_that_grows_keeps_what_its_blocks_hold():
    cache = BlockCache(CONTRACT, "cpu", ROWS, 64 * BLOCK_TOKENS)
    cache.make_room(0, [0], [40])
    for buffer in cache.buffers.values():
        buffer.copy_(torch.randn_like(buffer))
    before, version = cache.read(0, "value_0").clone(), cache.version
    cache.make_room(1, [0, 0, 0], [60 * BLOCK_TOKENS] * 3)
    assert cache.version > version, "older steps are void"
    torch.testing.assert_close(cache.read(0, "value_0"), before, rtol=0, atol=0)
    assert all(bool(torch.isfinite(buffer).all()) for buffer in cache.buffers.values())
    require_no_leak(cache)


def test_a_limited_pool_is_made_at_once_and_says_when_it_is_full():
    cache = block_cache(most_tokens=5 * BLOCK_TOKENS + 7)
    version = cache.version
    cache.make_room(0, [0, 0], [4 * BLOCK_TOKENS, 1])
    assert cache.version == version
    assert cache.holds([4 * BLOCK_TOKENS, BLOCK_TOKENS])
    assert not cache.holds([4 * BLOCK_TOKENS, BLOCK_TOKENS + 1])
    with pytest.raises(EngineError, match="has 0 blocks of 32 tokens left, row 2 needs 1 more"):
        cache.make_room(2, [0], [1])
    require_no_leak(cache)


def test_a_block_is_free_once_nobody_uses_it():
    pool = BlockPool()
    pool.grow(3)
    block = pool.take()
    pool.share(block)
    pool.release(block)
    assert (pool.used, pool.free) == (1, 1)
    pool.release(block)
    assert (pool.used, pool.free) == (0, 2)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("room"), st.integers(0, ROWS - 1), st.integers(0, CAPACITY - 20), st.integers(1, 17)),
        st.tuples(st.just("move"), st.integers(0, ROWS - 1), st.integers(0, ROWS - 1)),
        st.tuples(st.just("swap"), st.integers(0, ROWS - 1), st.integers(0, ROWS - 1)),
        st.tuples(st.just("free"), st.integers(0, ROWS - 1)),
        st.tuples(st.just("clear")),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(OPERATIONS)
def test_blocks_never_leak(operations):
    """Over rooms, commits, rollbacks, moves and ends in any order; valid entries stay what they were."""
    cache = block_cache()
    expected: dict[int, torch.Tensor] = {}
    for number, (name, *numbers) in enumerate(operations):
        if name == "room":
            row, start, width = numbers
            start = min(start, cache.entries[row])
            cache.make_room(row, [start], [width])
            for place in range(start, start + width):  # what a step would write
                cache.buffers["key_0"][cache.table[row, place // BLOCK_TOKENS], :, place % BLOCK_TOKENS] = (
                    number + place
                )
            cache.entries[row] = start + width
            expected[row] = cache.read(row, "key_0")[:, : start + width].clone()
        elif name == "move" and numbers[0] != numbers[1]:
            source, destination = numbers
            cache.move(source, destination)
            expected[destination] = expected.pop(source, torch.zeros(1, 0, 4))
        elif name == "swap" and numbers[0] != numbers[1]:
            one, other = numbers
            cache.swap(one, other)
            of_one, of_other = (expected.pop(row, torch.zeros(1, 0, 4)) for row in numbers)
            expected[one], expected[other] = of_other, of_one
        elif name == "free":
            cache.free(numbers[0])
            expected.pop(numbers[0], None)
        elif name == "clear":
            cache.clear()
            expected.clear()
        require_no_leak(cache)
        for row, entries in expected.items():
            assert torch.equal(cache.read(row, "key_0")[:, : cache.entries[row]], entries)
    cache.clear()
    assert cache.pool.used == 0


# In the loop.


def test_random_requests_leave_no_block_behind(llama: Pair):
    """They come, change what they draft, are cancelled and end; between rounds each row owns what it needs."""
    choose = random.Random(0)
    with Decoder.open(llama.bundle, "openvino", max_batch=ROWS) as decoder:
        caches = [decoder.target.cache, decoder.draft.cache]
        waiting, requests = 40, []
        while waiting or not all(request.finished for request in requests):
            for _ in range(min(waiting, choose.randint(0, 3))):
                prompt = [choose.randrange(64) for _ in range(choose.choice([1, 3, 40, 120]))]
                params = SamplingParams(temperature=1.0, max_new_tokens=choose.randint(1, 60), seed=waiting)
                requests.append(decoder.submit(prompt, params, draft_length=choose.choice([0, 1, 4, 16])))
                waiting -= 1
            decoder.step()
            for cache in caches:
                require_no_leak(cache)
                for row, occupant in enumerate(decoder.live):
                    assert len(blocks_of(cache, row)) <= -(-(occupant.request.length + 17) // BLOCK_TOKENS)
            for request in requests:
                if choose.random() < 0.02:
                    decoder.cancel(request)
        decoder.step()
        assert [cache.pool.used for cache in caches] == [0, 0]


def test_a_failed_round_leaves_no_block_behind(llama: Pair, monkeypatch: pytest.MonkeyPatch):
    with Decoder.open(llama.bundle, "openvino") as decoder:
        request = decoder.submit([5, 9, 17] * 20, SamplingParams(max_new_tokens=50, ignore_eos=True))
        decoder.step()
        monkeypatch.setattr(type(decoder.target.engine), "_run", lambda *_: (_ for _ in ()).throw(RuntimeError("lost")))
        with pytest.raises(EngineError, match="OpenVINO failed at batch 1, width 2: lost"):
            decoder.step()
        assert request.finish_reason == "error"
        assert decoder.target.cache.pool.used == decoder.draft.cache.pool.used == 0


# The budget.


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_requests_wait_until_the_caches_have_room_for_them(llama: Pair, engine: str):
    """Two fit at a time, by what they may need of both caches; all texts are as without a limit."""
    prompts = [[5 + i, 9, 17] for i in range(6)]
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    with Decoder.open(llama.bundle, engine) as decoder:
        expected = [one.token_ids for one in decoder.generate(prompts, params)]
        per_token = sum(model.engine.contract.cache_bytes_per_token for model in (decoder.target, decoder.draft))
    tokens = 2 * 128  # 63 tokens and 17 ahead take 96 in blocks, and 128 in rows
    with Decoder.open(llama.bundle, engine, cache_bytes=tokens * per_token) as decoder:
        requests = [decoder.submit(prompt, params) for prompt in prompts]
        most, memory = 0, 0
        while decoder.step():
            most = max(most, len(decoder.live))
            buffers = [b for model in (decoder.target, decoder.draft) for b in model.cache.buffers.values()]
            memory = max(memory, sum(buffer.nbytes for buffer in buffers))
        assert [request.output().token_ids for request in requests] == expected
    assert most == 2
    assert memory <= (tokens + BLOCK_TOKENS) * per_token, "the spare block comes on top"


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_a_request_that_can_never_fit_is_refused_when_it_is_submitted(llama: Pair, engine: str):
    with Decoder.open(llama.bundle, engine, cache_bytes=2**16) as decoder:
        with pytest.raises(RequestError, match=r"prompt of 3 tokens and max_new_tokens 100 need more cache than"):
            decoder.submit([5, 9, 17], SamplingParams(max_new_tokens=100))
        assert not decoder.step()


@pytest.mark.parametrize("cache_bytes", [0, -1, 1.5, "1GB", True])
def test_a_budget_that_is_no_number_of_bytes_is_refused(llama: Pair, cache_bytes: object):
    with pytest.raises(RequestError, match=r"cache_bytes is .*, expected a positive whole number"):
        Decoder.open(llama.bundle, cache_bytes=cache_bytes)


def test_rows_never_outgrow_what_was_promised_for_them():
    """Whatever the lengths that a cache of rows accepts, what it allocates for them is within its limit."""
    choose = random.Random(1)
    for _ in range(300):
        limit = choose.randint(64, 4000)
        cache = RowCache(IN_ROWS, "cpu", 8, most_tokens=limit)
        lengths = [choose.randint(1, 256 + MAX_DRAFT_LENGTH) for _ in range(choose.randint(1, 8))]
        if cache.holds(lengths):
            cache.make_room(0, [length - 1 for length in lengths], [1] * len(lengths))
            assert cache.rows * cache.capacity <= limit


def test_the_table_of_a_step_is_the_caches_own():
    cache = block_cache()
    tensors = cache.tensors(1, 2)
    assert tensors["blocks"].data_ptr() == cache.table[1].data_ptr()
    assert tensors["key_0"].data_ptr() == cache.buffers["key_0"].data_ptr()
