"""A model over a cache of eight bits is a target like any other: its texts are its own, whatever is proposed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from trt_spec.engines import Bundle, EngineError
from trt_spec.export.checking.oracle import checkpoint_logits
from trt_spec.export.checking.rounded_cache import entries_rounded
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.memory.budget import tokens_in
from trt_spec.runtime.memory.full import CacheFull

from ..kit.bundles import Pair, export_pair, noisy_draft, pair_of
from ..kit.caches import bytes_of, factors_of
from ..kit.models import tiny_gemma2, tiny_gpt2, tiny_llama
from ..kit.prompts import random_prompts

MAKERS: dict[str, Callable[..., Path]] = {"llama": tiny_llama, "gemma2": tiny_gemma2, "gpt2": tiny_gpt2}
SHAPES = (1, 4, 16, "4+3", "3x2x1", "3/6")
GREEDY = SamplingParams(max_new_tokens=32, temperature=0, ignore_eos=True)
PROMPTS = random_prompts(64, [9, 21, 3, 40], seed=3)
TIE = 0.03  # of logits whose deviation is 2: entries between two numbers of eight bits, which libraries round apart


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Pair]:
    made: dict[tuple[str, str], Pair] = {}

    def pair(family: str, cache: str = "int8") -> Pair:
        if (family, cache) not in made:
            folder = tmp_path_factory.mktemp(f"{family}-{cache}")
            alone = export_pair(MAKERS[family](folder / "checkpoint"), folder / "alone", cache=cache)
            made[family, cache] = pair_of(alone, noisy_draft(alone.bundle, folder / "bundle", noise=0.2))
        return made[family, cache]

    return pair


def texts(decoder: Decoder, draft_length: int | str) -> list[tuple[int, ...]]:
    return [one.token_ids for one in decoder.generate(PROMPTS, GREEDY, draft_length=draft_length)]


@pytest.mark.parametrize("family", MAKERS)
def test_greedy_texts_are_those_without_proposals_in_every_shape_and_batch(narrow, family: str):
    pair = narrow(family)
    with Decoder.open(pair.bundle, max_batch=1) as decoder:
        expected = texts(decoder, 0)
        assert texts(decoder, 4) == expected
    with Decoder.open(pair.bundle, max_batch=4) as decoder:
        assert all(texts(decoder, shape) == expected for shape in (0, *SHAPES))


@pytest.mark.parametrize("family", MAKERS)
def test_greedy_texts_are_those_of_transformers_over_a_cache_that_rounds_alike(narrow, family: str):
    pair = narrow(family)
    with Decoder.open(pair.bundle, max_batch=4) as decoder:
        found = texts(decoder, 4)
    with entries_rounded(pair.reference, Bundle.open(pair.bundle).target.contract, factors_of(pair.bundle)):
        for prompt, text in zip(PROMPTS, found, strict=True):
            said = checkpoint_logits(pair.reference, [*prompt, *text])[len(prompt) - 1 : -1]
            behind = said.amax(-1) - said[torch.arange(len(text)), list(text)]
            assert float(behind.max()) < TIE
            assert int((behind > 0).sum()) <= 1


def test_what_is_kept_for_others_and_given_up_leads_to_the_same_texts(narrow):
    bundle = narrow("llama").bundle
    [beginning] = random_prompts(64, [100], seed=4)
    prompts = [beginning + end for end in random_prompts(64, [5, 9, 14], seed=5)]
    with Decoder.open(bundle, max_batch=1) as decoder:
        expected = [decoder.generate([one], GREEDY, draft_length=0)[0].token_ids for one in prompts]
    with Decoder.open(bundle, max_batch=3, prefix_bytes=bytes_of(bundle, 32)) as decoder:
        requests = []
        for prompt in prompts:
            requests.append(decoder.submit(prompt, GREEDY, draft_length=4))
            while not requests[0].token_ids:
                decoder.step()
        while len(decoder._scheduler.seating.occupants) < 2:
            decoder.step()
        decoder._scheduler.seating.preempt(CacheFull("the test takes their places"))
        while decoder.step():
            pass
        outputs = [request.output() for request in requests]
        again = decoder.generate(prompts, GREEDY, draft_length="3x2x1")
    assert [one.token_ids for one in outputs] == [one.token_ids for one in again] == expected
    assert min(one.usage.cached_tokens for one in again) >= 64


def test_beams_are_those_of_a_search_alone(narrow):
    searched = SamplingParams(max_new_tokens=12, temperature=0, num_beams=3, num_return_sequences=3, ignore_eos=True)
    with Decoder.open(narrow("llama").bundle, max_batch=8) as decoder:
        alone = [decoder.generate([prompt], searched)[0].beams for prompt in PROMPTS[:2]]
        beside = decoder.generate([PROMPTS[0], PROMPTS[2], PROMPTS[1]], [searched, GREEDY, searched])
    assert [beside[0].beams, beside[2].beams] == alone
    assert len(alone[0]) == 3


def test_as_many_bytes_hold_nearly_twice_the_tokens_of_a_cache_in_float16(tmp_path: Path):
    def fitting(cache: str, dtype: str) -> int:
        checkpoint = tmp_path / "checkpoint"
        if not checkpoint.exists():
            tiny_llama(checkpoint, head_dim=64)
        bundle = export_pair(checkpoint, tmp_path / f"{cache}-{dtype}", cache=cache, dtype=dtype).bundle
        tokens = tokens_in([Bundle.open(bundle).target.contract], 1 << 20, "cache_bytes")
        assert tokens is not None
        return tokens

    assert fitting("full", "float16") / fitting("int8", "float32") == pytest.approx(66 / 128, rel=1e-3)


def test_engine_torch_writes_the_texts_of_numbers_of_fp8_which_onnxruntime_refuses(narrow):
    pair = narrow("llama", "fp8")
    with Decoder.open(pair.bundle, "torch", max_batch=4) as decoder:
        expected = texts(decoder, 0)
        assert texts(decoder, 4) == texts(decoder, "3x2x1") == expected
    with pytest.raises(EngineError, match=r"keeps keys and values in float8_e4m3fn, which ONNX Runtime has no CPU ker"):
        Decoder.open(pair.bundle)


def test_engine_torch_writes_the_texts_of_onnxruntime(narrow):
    pair = narrow("gemma2")
    with Decoder.open(pair.bundle, "torch", max_batch=4) as ours, Decoder.open(pair.bundle, max_batch=4) as theirs:
        assert texts(ours, "4+3") == texts(theirs, 4)


def test_engine_openvino_refuses_it_by_name(narrow):
    with pytest.raises(EngineError, match="keeps keys and values in int8, engine openvino expects float32"):
        Decoder.open(narrow("llama").bundle, "openvino")
