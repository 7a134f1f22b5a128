"""What requests leave behind is found by those that begin alike, saves the reading of it, and changes no text."""

import random
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from trt_spec.engines import BLOCK_TOKENS, RequestError
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.memory.prefixes import Block
from trt_spec.runtime.memory.snapshots import EVERY
from trt_spec.runtime.scheduling import results
from trt_spec.runtime.scheduling.prefill import NARROWEST

from ...kit.bundles import Pair
from ...kit.caches import bytes_of, read_by
from ...kit.hybrids import Hybrid
from ...kit.prompts import random_prompts

SETTINGS = [
    SamplingParams(max_new_tokens=20, ignore_eos=True),
    SamplingParams(max_new_tokens=20, ignore_eos=True, temperature=0.9, rule="coupled", seed=3),
    SamplingParams(max_new_tokens=20, ignore_eos=True, temperature=0.9, seed=3),
]
LONG = 220


@pytest.fixture(params=["onnxruntime", "openvino"])
def decoder(llama: Pair, request: pytest.FixtureRequest) -> Iterator[Decoder]:
    prefix_bytes = bytes_of(llama.bundle, 40)
    with Decoder.open(llama.bundle, request.param, max_batch=4, prefix_bytes=prefix_bytes) as decoder:
        yield decoder


@pytest.mark.parametrize("params", SETTINGS)
def test_a_prompt_that_was_read_before_is_read_from_its_end_alone(
    decoder: Decoder, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
):
    """By target and draft; text and proposals are the same, as are the bits of all entries."""
    [prompt] = random_prompts(64, [LONG], seed=5)
    read, outputs, entries = read_by(monkeypatch), [], []
    for _ in range(2):
        read.clear()
        request = decoder.submit(prompt, params, draft_length=3)
        while not request.finished:
            decoder.step()
            if len(entries) == len(outputs) and not request.finished:
                caches = [model.cache for model in (decoder.target, decoder.draft)]
                entries.append(
                    [cache.read(0, name)[:, : LONG - 2].clone() for cache in caches for name in cache.buffers]
                )
        outputs.append(request.output())
        cached = LONG - (LONG - NARROWEST) // BLOCK_TOKENS * BLOCK_TOKENS
        if len(outputs) == 2:
            assert read == {id(decoder.target): cached, id(decoder.draft): cached - 1}
    first, again = outputs
    assert (first.usage.cached_tokens, again.usage.cached_tokens) == (0, LONG - cached)
    assert again.token_ids == first.token_ids
    assert again.speculation.outcomes == first.speculation.outcomes
    for before, after in zip(*entries, strict=True):
        assert torch.equal(before, after)


def test_a_chat_that_goes_on_finds_what_was_said(decoder: Decoder):
    """The output of one request is part of the next one's prompt."""
    [prompt] = random_prompts(64, [100], seed=6)
    [first] = decoder.generate(prompt, SamplingParams(max_new_tokens=60, ignore_eos=True))
    [second] = decoder.generate([*prompt, *first.token_ids, *prompt[:40]], SamplingParams(max_new_tokens=5))
    assert second.usage.cached_tokens == 159 // BLOCK_TOKENS * BLOCK_TOKENS


def test_what_a_live_request_has_read_is_found_by_others(decoder: Decoder):
    [prompt] = random_prompts(64, [100], seed=7)
    live = decoder.submit(prompt, SamplingParams(max_new_tokens=120, ignore_eos=True))
    decoder.step()
    [output] = decoder.generate(prompt, SamplingParams(max_new_tokens=3, ignore_eos=True))
    assert output.usage.cached_tokens == 64
    assert not live.finished
    assert tuple(live.token_ids[:3]) == output.token_ids


def test_a_salt_hides_what_was_left(decoder: Decoder):
    [prompt] = random_prompts(64, [100], seed=8)
    found = []
    for salt in ("a", "b", "a", ""):
        request = decoder.submit(prompt, SamplingParams(max_new_tokens=3), cache_salt=salt)
        while decoder.step():
            pass
        found.append(request.output().usage.cached_tokens)
    assert found == [0, 0, 64, 0]
    assert (decoder.prefixes.asked_tokens, decoder.prefixes.found_tokens) == (400, 64)


def test_nothing_is_kept_unless_asked_for(llama: Pair):
    [prompt] = random_prompts(64, [100], seed=8)
    with Decoder.open(llama.bundle) as decoder:
        outputs = [decoder.generate(prompt, SamplingParams(max_new_tokens=3))[0] for _ in range(2)]
        assert [output.usage.cached_tokens for output in outputs] == [0, 0]
        assert decoder.prefixes.blocks == 0
        with pytest.raises(RequestError, match="prefix_bytes is 0, expected a positive whole number"):
            Decoder.open(llama.bundle, prefix_bytes=0)


def test_those_go_first_that_were_not_asked_for_longest(llama: Pair):
    prompts = random_prompts(64, [100, 100, 100], seed=9)
    with Decoder.open(llama.bundle, max_batch=1, prefix_bytes=bytes_of(llama.bundle, 7)) as decoder:

        def found(prompt) -> int:
            return decoder.generate(prompt, SamplingParams(max_new_tokens=2))[0].usage.cached_tokens

        assert [found(prompts[i]) for i in (0, 1, 0, 2, 0, 1)] == [0, 0, 64, 0, 64, 32]
        assert decoder.prefixes.blocks <= 2 * 7
        decoder.forget_outputs()
        assert decoder.prefixes.blocks == 0
        assert found(prompts[0]) == 0


def test_requests_at_random_say_what_they_say_alone_and_leave_no_block(decoder: Decoder, llama: Pair):
    """They share beginnings, come and go, are cancelled; few blocks are kept."""
    choose = random.Random(1)
    stems = random_prompts(64, [150, 70, 40], seed=10)
    ends = [[choose.randrange(64) for _ in range(choose.choice([1, 33]))] for _ in range(30)]
    prompts = [choose.choice(stems)[: choose.choice([40, 64, 70, 150])] + end for end in ends]
    params = [
        SamplingParams(max_new_tokens=choose.randint(1, 50), temperature=0.8, rule="coupled", seed=row, ignore_eos=True)
        for row in range(len(prompts))
    ]
    with Decoder.open(llama.bundle, max_batch=4) as plain:
        expected = [plain.generate(prompt, param)[0].token_ids for prompt, param in zip(prompts, params, strict=True)]
    decoder.prefixes._most = 9
    requests = []
    while len(requests) < len(prompts) or not all(request.finished for request in requests):
        if len(requests) < len(prompts) and choose.random() < 0.5:
            place = len(requests)
            requests.append(decoder.submit(prompts[place], params[place], draft_length=choose.choice([0, 3])))
        decoder.step()
        if requests and choose.random() < 0.05:
            decoder.cancel(choose.choice(requests))
    decoder.step()
    for request, tokens in zip(requests, expected, strict=True):
        assert tuple(request.token_ids) == tokens[: len(request.token_ids)]
        assert request.finish_reason == "cancelled" or len(request.token_ids) == len(tokens)
    assert decoder.prefixes.found_tokens > 300
    kept = [len(each) for each in decoder.prefixes._kept.values()]
    assert max(kept) <= 9
    for model, blocks in zip((decoder.target, decoder.draft), kept, strict=True):
        if model.engine.contract.in_blocks:
            assert model.cache.pool.used == blocks
    decoder.forget_outputs()
    if decoder.target.engine.contract.in_blocks:
        assert decoder.target.cache.pool.used == 0


@pytest.mark.parametrize("length", [2 * EVERY + 1, 2 * EVERY + NARROWEST - 1])
def test_a_recurrent_prompt_that_ends_soon_behind_a_copy_of_states_leaves_that(
    hybrids: Callable[[str], Hybrid], length: int
):
    bundle, params = hybrids("lfm2").bundle, SamplingParams(max_new_tokens=4, ignore_eos=True)
    [prompt] = random_prompts(64, [length + NARROWEST], seed=12)
    with Decoder.open(bundle, prefix_bytes=bytes_of(bundle, 18)) as decoder:
        [alone] = decoder.generate(prompt, params, draft_length=0)
        decoder.prefixes.forget()
        decoder.generate(prompt[:length], params)
        [found] = decoder.generate(prompt, params, draft_length=0)
    assert (alone.usage.cached_tokens, found.usage.cached_tokens) == (0, 2 * EVERY)
    assert found.token_ids == alone.token_ids


def test_after_an_error_nothing_is_found(decoder: Decoder, monkeypatch: pytest.MonkeyPatch):
    """An entry that was half written must never be read again."""
    [prompt] = random_prompts(64, [100], seed=11)
    decoder.submit(prompt, SamplingParams(max_new_tokens=50, ignore_eos=True))
    decoder.step()
    assert decoder.prefixes.blocks > 0
    with monkeypatch.context() as failing:
        failing.setattr(results, "Outcome", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            decoder.step()
    assert decoder.prefixes.blocks == 0
    assert decoder.generate(prompt, SamplingParams(max_new_tokens=2))[0].usage.cached_tokens == 0


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_watcher_knows_what_is_kept_and_from_what_it_was_made(
    llama: Pair, hybrids: Callable[[str], Hybrid], recurrent: bool
):
    """It can tell from what it was told alone what the next request will find, and never loses a block's parent.

    Where layers are recurrent that ends where states were copied, and it is told of no block after that.
    """
    bundle, step = (hybrids("lfm2").bundle, EVERY) if recurrent else (llama.bundle, BLOCK_TOKENS)
    known: dict[bytes, Block] = {}

    class Watching:
        def kept(self, blocks: Sequence[Block]) -> None:
            for block in blocks:
                assert block.key not in known
                assert block.parent is None or block.parent in known
                known[block.key] = block

        def dropped(self, keys: Sequence[bytes]) -> None:
            for key in keys:
                del known[key]
            assert all(block.parent is None or block.parent in known for block in known.values())

    def ends() -> list[int]:
        parents = {block.parent for block in known.values()}
        return [len(chain(key)) for key in known if key not in parents]

    def chain(key: bytes | None) -> tuple[int, ...]:
        return () if key is None else (*chain(known[key].parent), *known[key].tokens)

    choose = random.Random(3)
    stems = random_prompts(64, [440, 300, 300] if recurrent else [150, 70, 100], seed=10)
    lengths = [200, 300, 440] if recurrent else [40, 70, 150]
    with Decoder.open(bundle, max_batch=2, prefix_bytes=bytes_of(bundle, 18 if recurrent else 9)) as decoder:
        decoder.prefixes.watcher = Watching()
        for number in range(30):
            prompt = choose.choice(stems)[: choose.choice(lengths)] + choose.choice(stems)[: choose.choice([1, 40])]
            salt = choose.choice(["", "a"])
            most = max(0, len(prompt) - NARROWEST) // BLOCK_TOKENS * BLOCK_TOKENS
            chains = [chain(key) for key, block in known.items() if block.salt == salt]
            found = max(
                (len(one) for one in chains if one == tuple(prompt[: len(one)]) and len(one) <= most), default=0
            )
            found = found // step * step
            request = decoder.submit(prompt, SETTINGS[number % 3], cache_salt=salt)
            while decoder.step():
                pass
            assert request.output().usage.cached_tokens == found
            assert set(known) == set(decoder.prefixes._kept[decoder.target.cache])
            assert all(end % step == 0 for end in ends())
        assert decoder.prefixes.found_tokens > 200
        decoder.forget_outputs()
    assert known == {}
