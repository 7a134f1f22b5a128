"""What transformers' beam search finds, and how ours is compared with it."""

from collections.abc import Collection
from typing import Any

import pytest
from trt_spec.runtime import Output, SamplingParams

SETTINGS: list[dict[str, Any]] = [
    {"num_beams": 2},
    {"num_beams": 4, "length_penalty": 0.0},
    {"num_beams": 4, "length_penalty": 2.0, "early_stopping": True},
    {"num_beams": 8, "length_penalty": -1.0, "early_stopping": "never"},
    {"num_beams": 3, "length_penalty": 0.6, "early_stopping": "never", "min_tokens": 6},
]
OF_FIFTY: list[dict[str, Any]] = [  # texts
    {"num_beams": 2, "length_penalty": 0.5, "early_stopping": False},
    {"num_beams": 4, "length_penalty": 1.0, "early_stopping": True},
    {"num_beams": 8, "length_penalty": 1.5, "early_stopping": "never"},
]
TOLERANCE = {"rel": 2e-5, "abs": 1e-4}  # of scores, where float32 rounds otherwise

Found = tuple[list[list[int]], list[float]]  # texts, the best first, and their scores


def ours(asked: dict[str, Any], **more: Any) -> SamplingParams:
    """Our parameters of a search, all of whose texts are wanted."""
    return SamplingParams(num_return_sequences=asked["num_beams"], **asked | more)


def theirs(asked: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The same for transformers."""
    names = {"min_tokens": "min_new_tokens"}
    wanted = {"num_return_sequences": asked["num_beams"], "max_new_tokens": tokens, "do_sample": False}
    told = {"output_scores": True, "return_dict_in_generate": True}
    return {names.get(name, name): value for name, value in asked.items()} | wanted | told


def found(output: Any, before: int, ends: Collection[int]) -> Found:
    """Return transformers' texts after so many tokens, without what fills them up, and their scores."""
    texts = []
    for text in output.sequences.tolist():
        said = text[before:]
        end = next((place for place, token in enumerate(said, 1) if token in ends), len(said))
        texts.append(said[:end])
    return texts, output.sequences_scores.tolist()


def assert_theirs(output: Output, expected: Found) -> None:
    """Texts and scores are equal, but for texts that are as good as one another."""
    texts, scores = expected
    assert [beam.score for beam in output.beams] == pytest.approx(scores, **TOLERANCE)
    for beam, text, score in zip(output.beams, texts, scores, strict=True):
        as_good = [other for other, one in zip(texts, scores, strict=True) if one == pytest.approx(score, **TOLERANCE)]
        assert list(beam.token_ids) == text or (len(as_good) > 1 and list(beam.token_ids) in as_good)
    assert (output.token_ids, output.text) == (output.beams[0].token_ids, output.beams[0].text)
