"""A target in shards sees what it sees whole: each shard gets an image's entries, and puts them in once."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from trt_spec.runtime import Decoder, Output, SamplingParams

from ...kit.seeing_models import Seeing
from ...kit.shards import give_up_a_place, in_shards

LATER = pytest.mark.exhaustive
OTHERS = ("gemma3", "qwen2_5_vl", "mistral3", "smolvlm", "idefics3", "qwen3_vl")
EACH = pytest.mark.parametrize("kind", ["llava", *(pytest.param(kind, marks=LATER) for kind in OTHERS)])
ALL_KEPT = 1 << 24  # bytes of prefixes
CLOSE = 1e-5  # log-probabilities of numbers that were rounded alike
GREEDY = SamplingParams(max_new_tokens=16, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=16, temperature=1, seed=3, ignore_eos=True)
CHOICES = [
    (replace(GREEDY, logprobs=0), {"draft_length": 0}),
    (GREEDY, {"drafter": "model", "draft_length": "2x2"}),
    (SAMPLED, {"drafter": "lookup", "draft_length": 3}),
]


@EACH
def test_texts_after_images_are_those_of_one_device(seeing_of: Callable[[str], Seeing], kind: str, tmp_path: Path):
    """There are more prompts than rows, so that rows move, and prefixes are found again."""
    one = seeing_of(kind)

    def said(decoder: Decoder) -> list[list[Output]]:
        return [
            decoder.generate(
                [text for text, _ in one.prompts()], params, images=[own for _, own in one.prompts()], **drafting
            )
            for params, drafting in CHOICES
        ]

    found = [said(decoder) for decoder in whole_and_in_shards(one, tmp_path)]
    texts = [[[output.token_ids for output in outputs] for outputs in each] for each in found]
    assert texts[0] == texts[1]
    wanted, likeliest = ([output.logprobs[0].logprob for output in each[0]] for each in found)
    assert likeliest == pytest.approx(wanted, abs=CLOSE)
    assert abs(likeliest[0] - likeliest[3]) > 10 * CLOSE, "the same tokens with other images"


@EACH
def test_rows_with_images_that_give_up_their_place_go_on(seeing_of: Callable[[str], Seeing], kind: str, tmp_path: Path):
    one, found = seeing_of(kind), []
    for decoder in whole_and_in_shards(one, tmp_path):
        requests = [
            decoder.submit(text, GREEDY, images=images, drafter="model", draft_length=2)
            for text, images in one.prompts()
        ]
        for turn in range(200):
            if not decoder.step():
                break
            if turn % 4 == 3 and len(decoder.live) > 1:
                give_up_a_place(decoder)
        found.append([request.output().token_ids for request in requests])
    assert found[0] == found[1]


def whole_and_in_shards(one: Seeing, folder: Path) -> Iterator[Decoder]:
    for shards in (1, 2):
        in_shards(one.bundle, folder / str(shards), shards)
        with Decoder.open(folder / str(shards), "torch", max_batch=3, prefix_bytes=ALL_KEPT) as decoder:
            yield decoder
