"""Log-probabilities of prompts with images are transformers', and asking for them changes no text."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from trt_spec.runtime import Decoder, Output, SamplingParams

from ...kit.caches import memory_for
from ...kit.seeing_models import Seeing, image

LATER = pytest.mark.exhaustive
OTHERS = ("llava", "qwen2_5_vl", "mistral3", "llava-pixtral", "smolvlm", "idefics3", "qwen3_vl")
EACH = pytest.mark.parametrize("kind", ["gemma3", *(pytest.param(kind, marks=LATER) for kind in OTHERS)])
ASKED = SamplingParams(max_new_tokens=8, prompt_logprobs=2, ignore_eos=True)
ALL_KEPT = 1 << 24  # bytes of prefixes


def equal(output: Output, one: Seeing, prompt: str, images: list[bytes]) -> None:
    """Within 1e-4, the rounding of float32: a token that sees or stands otherwise changes them by far more."""
    ids, expected = one.ids(prompt, one.read(images)), one.log_probs(prompt, images)
    assert output.prompt_logprobs is not None
    first, *rest = output.prompt_logprobs
    assert first is None
    assert [found.token_id for found in rest if found] == ids[1:]
    for place, found in enumerate(rest):
        assert found is not None
        assert found.logprob == pytest.approx(float(expected[place, ids[place + 1]]), abs=1e-4), place
        likeliest = expected[place].topk(2).values.tolist()
        assert [value for _, value in found.top] == pytest.approx(likeliest, abs=1e-4), place


@EACH
def test_they_are_those_of_transformers_also_where_a_prefix_was_kept(seeing_of: Callable[[str], Seeing], kind: str):
    one = seeing_of(kind)
    prompts = one.prompts()
    texts, images = [text for text, _ in prompts], [own for _, own in prompts]
    plain = replace(ASKED, prompt_logprobs=None)
    with Decoder.open(one.bundle, prefix_bytes=ALL_KEPT) as decoder:
        before, scored, after = (
            decoder.generate(texts, params, images=images, draft_length=2) for params in (plain, ASKED, plain)
        )
    assert [output.usage.cached_tokens > 0 for output in after][::3] == [True, True]
    for output, prompt in zip(scored, prompts, strict=True):
        equal(output, one, *prompt)
    for found in (scored, after):
        assert [output.token_ids for output in found] == [output.token_ids for output in before]


@pytest.mark.parametrize("before", [61, 62, 252, 253])
def test_no_call_cuts_an_image_whose_tokens_see_each_other(seeing_of: Callable[[str], Seeing], before: int):
    """One gives the log-probabilities of 65 tokens, and 256 are scored between two rounds."""
    one = seeing_of("gemma3")
    prompt = f"{'z' * before}{one.placeholder}{one.placeholder} and so on"
    images = [image(30, 50), image(101, 7)]
    with Decoder.open(one.bundle) as decoder:
        [output] = decoder.generate(prompt, ASKED, images=[images])
    equal(output, one, prompt, images)


@LATER
def test_they_are_found_again_by_requests_that_gave_up_their_place(seeing_of: Callable[[str], Seeing]):
    one = seeing_of("gemma3")
    prompts = one.prompts()
    params = replace(ASKED, max_new_tokens=90)
    with memory_for(700) as refused, Decoder.open(one.bundle, max_batch=5) as decoder:
        outputs = decoder.generate([text for text, _ in prompts], params, images=[own for _, own in prompts])
        admitted = decoder._scheduler.seating._admitted
    assert refused
    assert admitted > len(prompts), "some came twice"
    for output, prompt in zip(outputs, prompts, strict=True):
        equal(output, one, *prompt)
