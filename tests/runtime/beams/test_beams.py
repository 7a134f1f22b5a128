"""Beam search with and without a draft finds transformers' texts and scores."""

import random
from typing import Any

import pytest
import torch
from trt_spec.engines import RequestError
from trt_spec.runtime import Decoder, Output, SamplingParams

from ...bundles import Pair

VOCAB = 64
SETTINGS = [
    {"num_beams": 2},
    {"num_beams": 4, "length_penalty": 0.0},
    {"num_beams": 4, "length_penalty": 2.0, "early_stopping": True},
    {"num_beams": 8, "length_penalty": -1.0, "early_stopping": "never"},
    {"num_beams": 3, "length_penalty": 0.6, "early_stopping": "never", "min_tokens": 6},
]
NEW = 24
TOLERANCE = 1e-3  # of scores, where float32 rounds otherwise


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(2, VOCAB) for _ in range(chance.randrange(1, 20))] for _ in range(count)]


def theirs(model: Any, prompt: list[int], eos: int | list[int] | None, max_new_tokens: int = NEW, **asked: Any) -> Any:
    """transformers' texts, the best first, without what fills them up, and their scores."""
    asked = dict(asked)
    if "min_tokens" in asked:
        asked["min_new_tokens"] = asked.pop("min_tokens")
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_return_sequences=asked["num_beams"],
            eos_token_id=eos,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
            **asked,
        )
    ends = set() if eos is None else {eos} if isinstance(eos, int) else set(eos)
    texts = []
    for text in found.sequences.tolist():
        said = text[len(prompt) :]
        end = next((place for place, token in enumerate(said, 1) if token in ends), len(said))
        texts.append(said[:end])
    return texts, found.sequences_scores.tolist()


def assert_theirs(output: Output, expected: Any) -> None:
    texts, scores = expected
    assert [beam.score for beam in output.beams] == pytest.approx(scores, abs=TOLERANCE)
    said = [list(beam.token_ids) for beam in output.beams]
    if said != texts:  # where two are as good, either may come first
        for ours, text, score in zip(said, texts, scores, strict=True):
            assert ours == text or sum(abs(score - other) < TOLERANCE for other in scores) > 1
    assert output.token_ids == output.beams[0].token_ids
    assert output.text == output.beams[0].text


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_the_texts_are_those_of_transformers_whatever_the_draft_proposes(pairs, family: str) -> None:
    pair: Pair = pairs(family)
    with Decoder.open(pair.bundle, max_batch=3) as decoder:
        stops = sorted(decoder.bundle.tokenizer.eos_token_ids)
        for number, asked in enumerate(SETTINGS):
            each = prompts(3, number)
            params = SamplingParams(
                max_new_tokens=NEW, num_return_sequences=asked["num_beams"], stop_token_ids=[5, 9], **asked
            )
            expected = [theirs(pair.reference, prompt, [*stops, 5, 9], **asked) for prompt in each]
            for length in (0, 1, 4):
                outputs = decoder.generate(each, params, draft_length=length)
                for output, wanted in zip(outputs, expected, strict=True):
                    assert_theirs(output, wanted)
