"""Log-probabilities of a prompt are the target's own, and asking for them changes no text."""

from dataclasses import replace

import pytest
import torch
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.scheduling import prefill, reading

from ...kit.bundles import Pair

PROMPT = [5, 9, 30, 9, 31, 9, 7, 44, 2, 60] * 9  # longer than a step that verifies
PARAMS = SamplingParams(max_new_tokens=12, prompt_logprobs=3, ignore_eos=True)


@pytest.fixture(scope="module")
def decoder(llama: Pair):
    with Decoder.open(llama.bundle, max_batch=3) as decoder:
        yield decoder


@torch.inference_mode()
def expected(pair: Pair, prompt: list[int]) -> torch.Tensor:
    """transformers in float32: row i is what follows token i."""
    return pair.reference(torch.tensor([prompt])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("length", [2, 17, 18, 19, 90])
def test_they_are_those_of_transformers(llama: Pair, decoder: Decoder, length: int):
    """Within 1e-4, the rounding of float32 through two layers."""
    prompt = PROMPT[:length]
    [output] = decoder.generate([prompt], PARAMS)
    first, *rest = output.prompt_logprobs
    assert first is None
    assert [one.token_id for one in rest] == prompt[1:]
    by_reference = expected(llama, prompt)
    for place, one in enumerate(rest):
        assert one.logprob == pytest.approx(by_reference[place, one.token_id].item(), abs=1e-4)
        likeliest = by_reference[place].topk(3)
        assert [value for _, value in one.top] == pytest.approx(likeliest.values.tolist(), abs=1e-4)


def test_they_survive_the_move_of_their_row_between_two_steps(llama: Pair, monkeypatch: pytest.MonkeyPatch):
    """Each step scores a part of the prompt, while the row before it is freed."""
    for module in (prefill, reading):
        monkeypatch.setattr(module, "PREFILL_WIDTH", 40)
    prompt = PROMPT
    with Decoder.open(llama.bundle, max_batch=2) as decoder:
        neighbour = decoder.submit([5, 6], replace(PARAMS, prompt_logprobs=None))
        decoder.step()
        request = decoder.submit(prompt, replace(PARAMS, max_new_tokens=4))
        decoder.step()
        assert 0 < request.unscored < len(prompt)
        decoder.cancel(neighbour)
        while decoder.step():
            pass
        [plain] = decoder.generate([prompt], replace(PARAMS, max_new_tokens=4, prompt_logprobs=None))
    by_reference = expected(llama, prompt)
    found = [one.logprob for one in request.output().prompt_logprobs[1:]]
    wanted = [by_reference[place, token].item() for place, token in enumerate(prompt[1:])]
    assert found == pytest.approx(wanted, abs=1e-4)
    assert request.output().token_ids == plain.token_ids


def test_a_prompt_of_one_token_has_none(decoder: Decoder):
    [output] = decoder.generate([[5]], PARAMS)
    assert output.prompt_logprobs == (None,)


def test_asking_for_them_changes_no_text_and_no_neighbour(decoder: Decoder):
    asked = [replace(PARAMS, prompt_logprobs=count) for count in (None, 0, 20)]
    outputs = decoder.generate([PROMPT] * 3, asked)
    assert len({output.token_ids for output in outputs}) == 1
    assert outputs[0].prompt_logprobs is None
    assert {len(one.top) for one in outputs[1].prompt_logprobs[1:]} == {0}
    assert {len(one.top) for one in outputs[2].prompt_logprobs[1:]} == {20}
