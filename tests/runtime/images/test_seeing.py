"""What is said of images is what transformers says of them, whatever proposes, and whoever else is in the batch."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from trt_spec.engines import BLOCK_TOKENS, EngineError
from trt_spec.runtime import Decoder, Output, RequestError, SamplingParams
from trt_spec.runtime.scheduling.prefill import NARROWEST

from ...kit.caches import memory_for
from ...kit.replaying import replaying
from ...kit.seeing_models import Seeing, image

LATER = pytest.mark.exhaustive
KINDS = [
    "llava",
    "gemma3",
    "qwen2_5_vl",
    *(pytest.param(kind, marks=LATER) for kind in ("mistral3", "llava-pixtral", "smolvlm", "idefics3", "qwen3_vl")),
]
OTHERS = ("gemma3", "qwen2_5_vl", "mistral3", "llava-pixtral", "smolvlm", "idefics3", "qwen3_vl")
EACH = pytest.mark.parametrize("kind", ["llava", *(pytest.param(kind, marks=LATER) for kind in OTHERS)])
MOST = 20
CLOSE = 1e-4  # to transformers' log-probabilities, which a token that sees or stands otherwise changes by far more
ALL_KEPT = 1 << 24  # bytes of prefixes


def first_of(output: Output) -> float:
    """Return the log-probability of the first token."""
    assert output.logprobs is not None
    return output.logprobs[0].logprob


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "drafting",
    [
        {"draft_length": 0},
        {"drafter": "lookup", "draft_length": 4},
        {"drafter": "model", "draft_length": "3+4"},
        {"drafter": "model", "draft_length": "3/9"},
    ],
    ids=str,
)
def test_greedy_texts_of_a_mixed_batch_are_those_of_transformers(
    seeing_of: Callable[[str], Seeing], kind: str, drafting: dict[str, object]
):
    one = seeing_of(kind)
    prompts = one.prompts()
    expected = [one.said(*prompt, MOST) for prompt in prompts]
    likeliest = [pytest.approx(one.likeliest(*prompt), abs=CLOSE) for prompt in prompts]
    with Decoder.open(one.bundle, prefix_bytes=ALL_KEPT) as decoder:
        asked = [text for text, _ in prompts], SamplingParams(max_new_tokens=MOST, logprobs=0)
        images = [own for _, own in prompts]
        first = decoder.generate(*asked, images=images, **drafting)
        again = decoder.generate(*asked, images=images, **drafting)
    assert [list(output.token_ids) for output in first] == expected
    assert [list(output.token_ids) for output in again] == expected
    assert [first_of(output) for output in first] == likeliest
    assert [first_of(output) for output in again] == likeliest
    assert {output.usage.cached_tokens > 0 for output in again} == {False, True}
    assert [output.usage.cached_tokens > 0 for output in again][::3] == [True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_may_be_an_image_alone(seeing_of: Callable[[str], Seeing], kind: str):
    """Text goes on after its highest position of all axes, in transformers' forward pass as here.

    Its `generate` counts on from each axis of the last entry, and so contradicts that pass.
    """
    one = seeing_of(kind)
    given = [[image(40, 30)], [image(20, 14)], [image(30, 64)]]
    with Decoder.open(one.bundle) as decoder:
        no_more = {one.image_token: -torch.inf}  # transformers would want an image for it
        params = SamplingParams(max_new_tokens=MOST, logprobs=0, ignore_eos=True, logit_bias=no_more)
        outputs = decoder.generate([one.placeholder] * 3, params, images=given, drafter="model", draft_length=3)
    for output, images in zip(outputs, given, strict=True):
        scores = one.scores(one.placeholder, images, output.token_ids)
        scores[:, one.image_token] = -torch.inf
        best = scores.max(-1)
        assert list(output.token_ids) == best.indices.tolist()
        assert output.logprobs is not None
        assert [token.logprob for token in output.logprobs] == pytest.approx(best.values.tolist(), abs=CLOSE)


@EACH
def test_the_graphs_that_see_run_in_torch_as_well(seeing_of: Callable[[str], Seeing], kind: str):
    one = seeing_of(kind)
    prompts = one.prompts()[:3]
    with Decoder.open(one.bundle, "torch") as decoder:
        outputs = decoder.generate(
            [text for text, _ in prompts],
            SamplingParams(max_new_tokens=MOST),
            images=[own for _, own in prompts],
            drafter="model",
            draft_length=3,
        )
    assert [list(output.token_ids) for output in outputs] == [one.said(*prompt, MOST) for prompt in prompts]


@EACH
def test_a_coupled_text_with_images_is_the_same_with_any_draft(seeing_of: Callable[[str], Seeing], kind: str):
    one = seeing_of(kind)
    prompt, images = one.prompts()[0]
    params = SamplingParams(max_new_tokens=30, temperature=0.8, rule="coupled", seed=5, ignore_eos=True)
    texts = set()
    with Decoder.open(one.bundle) as decoder:
        for drafting in (
            {"draft_length": 0},
            {"drafter": "model", "draft_length": 4},
            {"drafter": "model", "draft_length": "3/9"},
            {"drafter": "lookup"},
        ):
            [output] = decoder.generate(prompt, params, images=[images], **drafting)
            texts.add(output.token_ids)
    assert len(texts) == 1


@EACH
def test_penalties_read_the_token_of_an_image_as_transformers_do(seeing_of: Callable[[str], Seeing], kind: str):
    one = seeing_of(kind)
    prompt, images = one.prompts()[1]
    expected = one.said(prompt, images, MOST, repetition_penalty=1.4)
    assert expected != one.said(prompt, images, MOST), "the penalty changes the text"
    with Decoder.open(one.bundle) as decoder:
        params = SamplingParams(max_new_tokens=MOST, repetition_penalty=1.4)
        [output] = decoder.generate(prompt, params, images=[images], drafter="lookup", draft_length=3)
    assert list(output.token_ids) == expected


@EACH
def test_requests_with_images_that_give_up_their_place_go_on_with_the_same_text(
    seeing_of: Callable[[str], Seeing], kind: str
):
    one = seeing_of(kind)
    prompts, params = one.prompts(), SamplingParams(max_new_tokens=90, ignore_eos=True)
    with Decoder.open(one.bundle, max_batch=1) as alone:
        expected = [alone.generate(text, params, images=[own])[0].token_ids for text, own in prompts]
    with memory_for(700) as refused, Decoder.open(one.bundle, max_batch=5) as decoder:
        outputs = decoder.generate(
            [text for text, _ in prompts], params, images=[own for _, own in prompts], drafter="model", draft_length=3
        )
        admitted = decoder._scheduler.seating._admitted
    assert refused
    assert admitted > len(prompts), "some came twice"
    assert [output.token_ids for output in outputs] == expected


@EACH
def test_beams_after_an_image_find_the_text_of_transformers(seeing_of: Callable[[str], Seeing], kind: str):
    one = seeing_of(kind)
    prompt, images = one.prompts()[1]
    with Decoder.open(one.bundle) as decoder:
        params = SamplingParams(max_new_tokens=12, num_beams=3)
        [output] = decoder.generate(prompt, params, images=[images], drafter="model", draft_length=2)
    assert list(output.token_ids) == one.said(prompt, images, 12, num_beams=3)


def test_replayed_rounds_after_images_write_the_text_of_eager_ones(seeing_of: Callable[[str], Seeing]):
    """A row's positions are shifted by its images, also in rounds that were recorded for other rows."""
    one = seeing_of("qwen2_5_vl")
    prompts = one.prompts()
    asked = [text for text, _ in prompts], SamplingParams(max_new_tokens=MOST, ignore_eos=True)
    images, drafting = [own for _, own in prompts], {"drafter": "model", "draft_length": 3}
    with Decoder.open(one.bundle, max_batch=2) as decoder:
        expected = [output.token_ids for output in decoder.generate(*asked, images=images, **drafting)]
    with replaying() as machine, Decoder.open(one.bundle, "torch", max_batch=2) as decoder:
        found = [output.token_ids for output in decoder.generate(*asked, images=images, **drafting)]
    assert sum(machine.launched) > 4, "rounds were replayed"
    assert found == expected


@pytest.mark.parametrize("before", [250, 252, 254])
def test_no_call_cuts_an_image_whose_tokens_see_each_other(seeing_of: Callable[[str], Seeing], before: int):
    """A call reads 256 tokens of a prompt, and would end within the image."""
    one = seeing_of("gemma3")
    prompt, images = f"{'z' * before}{one.placeholder}{' and so on' * 5}", [image(30, 50)]
    with Decoder.open(one.bundle, prefix_bytes=ALL_KEPT) as decoder:
        params = SamplingParams(max_new_tokens=MOST, logprobs=0)
        outputs = [decoder.generate(prompt, params, images=[images], draft_length=2)[0] for _ in range(2)]
    assert [list(output.token_ids) for output in outputs] == [one.said(prompt, images, MOST)] * 2
    assert list(map(first_of, outputs)) == [pytest.approx(one.likeliest(prompt, images), abs=CLOSE)] * 2


@pytest.mark.parametrize("before", [24, 26, 28])
def test_a_prefix_ends_before_an_image_that_it_would_cut(seeing_of: Callable[[str], Seeing], before: int):
    """Blocks of 32 tokens are kept, whose border is within the image or beside it."""
    one = seeing_of("gemma3")
    images, params = [image(30, 50)], SamplingParams(max_new_tokens=MOST, logprobs=0)
    prompts = [f"{'z' * before}{one.placeholder}{end * 60}" for end in "ab"]
    with Decoder.open(one.bundle, prefix_bytes=ALL_KEPT) as decoder:
        outputs = [decoder.generate(prompt, params, images=[images], draft_length=0)[0] for prompt in prompts]
        cut = one.runs(prompts[0], images)
    likeliest = [pytest.approx(one.likeliest(prompt, images), abs=CLOSE) for prompt in prompts]
    assert list(map(first_of, outputs)) == likeliest
    assert [list(output.token_ids) for output in outputs] == [one.said(prompt, images, MOST) for prompt in prompts]
    assert outputs[1].usage.cached_tokens == next((begin for begin, end in cut if begin < 32 < end), 32)


@EACH
def test_prompts_with_the_same_tokens_and_other_images_share_no_prefix(seeing_of: Callable[[str], Seeing], kind: str):
    one = seeing_of(kind)
    text = f"{one.placeholder}{'y' * 70}"
    params, first = SamplingParams(max_new_tokens=4), image(9, 9, 0)
    may_be_cached = len(one.ids(text, one.read([first]))) - NARROWEST
    with Decoder.open(one.bundle, prefix_bytes=ALL_KEPT) as decoder:

        def cached(*images: bytes) -> int:
            return decoder.generate(text, params, images=[images])[0].usage.cached_tokens

        again = may_be_cached - may_be_cached % BLOCK_TOKENS
        assert again >= BLOCK_TOKENS
        assert [cached(first), cached(image(9, 9, 1)), cached(first)] == [0, 0, again]


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl"])
def test_a_prefix_is_found_by_prompts_that_go_on_with_another_image(seeing_of: Callable[[str], Seeing], kind: str):
    """Where its tokens stand does not depend on what comes after them."""
    one = seeing_of(kind)
    images, params = [image(121, 85, 0), image(45, 99, 1)], SamplingParams(max_new_tokens=MOST, logprobs=0)
    begins = f"{one.placeholder}{' is said' * 12}"
    prompts = [(begins, images[:1]), (f"{begins}{one.placeholder} or not?", images)]
    with Decoder.open(one.bundle, prefix_bytes=ALL_KEPT) as decoder:
        outputs = [decoder.generate(text, params, images=[own], draft_length=0)[0] for text, own in prompts]
    assert outputs[1].usage.cached_tokens >= 64
    assert [list(output.token_ids) for output in outputs] == [one.said(*prompt, MOST) for prompt in prompts]
    assert list(map(first_of, outputs)) == [pytest.approx(one.likeliest(*prompt), abs=CLOSE) for prompt in prompts]


def test_an_image_is_seen_once_for_all_rows(llava: Seeing):
    prompt, images = llava.prompts()[1]
    with Decoder.open(llava.bundle) as decoder:
        eyes = decoder._models.eyes
        assert eyes is not None
        seen, original = [], eyes._seen
        eyes._seen = lambda *given: seen.append(given) or original(*given)  # type: ignore[method-assign,func-returns-value]
        decoder.generate([prompt, prompt, prompt], SamplingParams(max_new_tokens=3), images=[images] * 3)
    assert len(seen) == 1


def test_images_are_refused_in_a_sentence_where_they_cannot_be_seen(llava: Seeing, llama: object):
    with Decoder.open(llava.bundle) as decoder:
        with pytest.raises(RequestError, match=r"the prompt has 0 places for 1 image; write <image> once for each"):
            decoder.submit("nothing to see", images=[image(9, 9)])
        with pytest.raises(RequestError, match=r"an image cannot be read"):
            decoder.submit(llava.placeholder, images=[b"GIF89a, but not really"])
        with pytest.raises(RequestError, match=r"^image 2 of 3: an image cannot be read"):
            decoder.submit(llava.placeholder * 3, images=[image(9, 9), b"GIF89a, but not really", image(9, 9)])
        with pytest.raises(RequestError, match=r"images for 1 of 2 prompts, expected a list for each"):
            decoder.generate(["a", "b"], images=[[]])
    with Decoder.open(llama.bundle) as decoder, pytest.raises(RequestError, match=r"reads no images; .* --images"):  # type: ignore[attr-defined]
        decoder.submit("x", images=[image(9, 9)])
    with pytest.raises(EngineError, match=r"engine openvino takes no state of the kind 'image', .* use engine onnx"):
        Decoder.open(llava.bundle, "openvino")


def test_what_the_model_has_said_itself_holds_no_images(llava: Seeing):
    """A text that moves goes on, even if a placeholder is among its tokens."""
    prompt, files = f"what is {llava.placeholder} this?", [image(121, 85)]
    tokens = [llava.image_token, 65, 66]
    params = SamplingParams(16, temperature=1.0, seed=3, rule="coupled", allowed_token_ids=tokens, ignore_eos=True)
    with Decoder.open(llava.bundle, prefix_bytes=ALL_KEPT) as decoder:
        whole = decoder.generate(prompt, params, images=[files])[0].token_ids
        assert llava.image_token in whole[:8]
        ids = decoder.tokenizer.encode(prompt).ids
        moved = decoder.submit([*ids, *whole[:8]], replace(params, max_new_tokens=8), images=files, said=8)
        while not moved.finished:
            decoder.step()
        assert moved.output().token_ids == whole[8:]
        with pytest.raises(RequestError, match="for 1 image;"):
            decoder.submit([*ids, *whole[:8]], params, images=files)
