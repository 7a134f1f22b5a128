"""Prompts are read in chunks and together; the first token comes with the last of them, before the draft reads any."""

import pytest
import torch
from trt_spec.engines import PREFILL_WIDTH
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.memory.model import Model
from trt_spec.runtime.scheduling.prefill import NARROWEST, _next_chunk

from ..kit.bundles import Pair
from ..kit.prompts import random_prompts
from .scripted import scripted_decoder


def counting(context) -> int:
    return (context[-1] + 1) % 256


@pytest.mark.parametrize("tokens", [1, 5, 33, 255, 256, 257, 289, 290, 300, 512, 513, 900, 2048])
def test_no_chunk_is_narrow_but_that_of_a_short_prompt(tokens: int):
    chunks, missing = [], tokens
    while missing:
        chunks.append(_next_chunk(missing))
        missing -= chunks[-1]
    assert max(chunks) <= PREFILL_WIDTH
    assert len(chunks) == -(-tokens // PREFILL_WIDTH)
    assert min(chunks) >= min(tokens, NARROWEST)


@pytest.mark.parametrize("k", [0, 3])
def test_the_first_token_comes_with_the_prompt_before_the_draft_reads(tmp_path, k: int):
    seen = []
    with scripted_decoder(tmp_path, counting, counting) as decoder:
        target, draft = decoder.target.engine, decoder.draft.engine

        def report(request) -> None:
            seen.append((len(request.token_ids), list(target.widths), list(draft.widths)))

        decoder.submit([5, 6, 7, 8], SamplingParams(max_new_tokens=9), draft_length=k, on_progress=report)
        decoder.step()
    assert seen[0] == (1, [(1, 4)], [])
    assert seen[1][0] == 1 + k + 1


def test_a_prompt_of_one_token_is_left_to_the_first_round(tmp_path):
    with scripted_decoder(tmp_path, counting, counting) as decoder:
        request = decoder.submit([5], SamplingParams(max_new_tokens=9), draft_length=3)
        decoder.step()
        assert decoder.target.engine.widths == [(1, 1 + 3)] or decoder.target.engine.widths == [(1, 1)]
        assert request.speculation.tokens == len(request.token_ids)


def test_an_output_that_ends_with_its_first_token_leaves_no_row(tmp_path):
    with scripted_decoder(tmp_path, counting, counting) as decoder:
        outputs = decoder.generate([[5, 6], [7, 8], [1, 2, 3]], SamplingParams(max_new_tokens=1, ignore_eos=True))
        assert [output.token_ids for output in outputs] == [(7,), (9,), (4,)]
        assert decoder.speculation.rounds == 0
        assert not decoder.live
        assert sum(decoder.target.cache.entries) == 0


@pytest.mark.parametrize(
    ("engine", "lengths", "expected"),
    [
        ("openvino", [9, 100, 30, 100, 60, 5], [[9, 100, 30, 100, 5], [60]]),
        ("onnxruntime", [9, 8, 9, 100, 30, 40, 40], [[9, 8, 9], [100], [30, 40, 40]]),
    ],
    ids=["packed", "padded"],
)
def test_prompts_are_read_in_one_call_as_far_as_the_budget_goes(
    llama: Pair, monkeypatch: pytest.MonkeyPatch, engine: str, lengths: list[int], expected: list[list[int]]
):
    read, calls = Model.prefill, []

    def watched(self, rows, tokens):
        calls.append([len(each) for each in tokens])
        return read(self, rows, tokens)

    prompts = random_prompts(64, lengths, seed=4)
    params = SamplingParams(max_new_tokens=12, temperature=1.0, rule="coupled", seed=3, ignore_eos=True)
    with Decoder.open(llama.bundle, engine, max_batch=len(lengths)) as decoder:
        monkeypatch.setattr(Model, "prefill", watched)
        together = decoder.generate(prompts, params, draft_length=0)
        assert calls == expected
        alone = [decoder.generate([prompt], params, draft_length=0)[0] for prompt in prompts]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]


def test_a_prompt_has_the_same_bits_beside_others(llama: Pair):
    """What is kept of it equals what another reading gives, whoever its neighbours were."""
    prompts = [torch.tensor(prompt) for prompt in random_prompts(64, [40, 36, 40, 33], seed=4)]
    with Decoder.open(llama.bundle, max_batch=len(prompts)) as decoder:
        target = decoder.target
        logits = target.prefill(range(len(prompts)), prompts).clone()
        [memory] = target.cache.memory.tokens
        together = memory.clone()
        for row, prompt in enumerate(prompts):
            target.cache.clear()
            assert torch.equal(target.prefill([0], [prompt])[0], logits[row])
            assert torch.equal(memory[:, 0, :, : len(prompt)], together[:, row, :, : len(prompt)])


def test_a_short_prompt_overtakes_a_long_one_that_is_still_read(tmp_path):
    """Its row changes places with that of the long one."""
    with scripted_decoder(tmp_path, counting, counting, max_batch=4) as decoder:
        live = decoder.submit([1, 2], SamplingParams(max_new_tokens=300, ignore_eos=True), draft_length=1)
        decoder.step()
        seating = decoder._scheduler.seating
        long = decoder.submit([9] * 1000, SamplingParams(max_new_tokens=5, ignore_eos=True), draft_length=1)
        decoder.step()
        [occupant] = seating.prefilling
        short = decoder.submit([3, 4], SamplingParams(max_new_tokens=50, ignore_eos=True), draft_length=1)
        seating.admit()
        seating.prefilling.reverse()  # as where the engine reads both in one call
        decoder.step()
        row_of = {one.request: one.row for one in (*seating.live, *seating.prefilling)}
        assert row_of == {live: 0, short: 1, long: 2}
        assert occupant.row == 2
        while decoder.step():
            pass
    assert long.token_ids == [(10 + i) % 256 for i in range(5)]
    assert short.token_ids == [(5 + i) % 256 for i in range(50)]
    assert live.token_ids == [(3 + i) % 256 for i in range(300)]
