"""A predicted output is copied from, found again after each edit, and changes no text."""

from collections import Counter
from dataclasses import replace

import pytest
from tokenizers.processors import TemplateProcessing
from trt_spec.runtime import Decoder, RequestError, SamplingParams
from trt_spec.runtime.requests.request import Request
from trt_spec.tools.certificate.chi_squared import statistic, tail

from ...kit.bundles import Pair
from ...kit.exact import PROMPT, exact_distribution
from ...kit.prompts import random_prompts
from ...kit.sampled import FALSE_ALARM
from ..scripted import EOS, byte_tokenizer, encoded, says, scripted_decoder

FILE = "".join(f"line {number} of the file is about thing {number * 7 % 13}\n" for number in range(60))
EDITED = FILE.replace("line 30 of the file is about thing 2", "the thirtieth line has been written anew")


def edit(tmp_path, prediction: str) -> tuple[str, int, int]:
    """The text, the runs of the target, and the accepted proposals."""
    assert EDITED != FILE
    prompt = encoded("Edit it.\n")
    with scripted_decoder(tmp_path, says(encoded(EDITED), len(prompt)), max_length=8192) as decoder:
        params = SamplingParams(max_new_tokens=4000)
        request = decoder.submit(prompt, params, prediction=encoded(prediction) if prediction else ())
        while decoder.step():
            pass
        output = request.output()
        return output.text, output.speculation.rounds, output.speculation.accepted


def test_an_edited_file_takes_a_small_part_of_the_rounds(tmp_path):
    text, rounds, accepted = edit(tmp_path, FILE)
    assert text == EDITED
    tokens = len(encoded(EDITED))
    assert rounds < tokens / 10
    assert accepted > 0.9 * tokens


def test_the_first_round_copies_the_beginning(tmp_path):
    prompt, answer = encoded("Say it."), encoded("abcdefghijklmnop")
    with scripted_decoder(tmp_path, says(answer, len(prompt))) as decoder:
        request = decoder.submit(prompt, SamplingParams(max_new_tokens=30), prediction=answer)
        decoder.step()
        assert request.token_ids == [*answer, EOS]
        assert request.drafter == "suffix"


def test_a_predicted_text_does_not_begin_with_what_a_tokenizer_puts_before_texts(tmp_path):
    """Between the prompt and the prediction it would break the match."""
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = TemplateProcessing("</s> $A", special_tokens=[("</s>", EOS)])
    answer = encoded("abcdefghijklmnop")
    with scripted_decoder(tmp_path, says(answer, 1 + 7), tokenizer=tokenizer) as decoder:
        request = decoder.submit("Say it.", SamplingParams(max_new_tokens=30), prediction="abcdefghijklmnop")
        assert request.prompt == (EOS, *encoded("Say it."))
        decoder.step()
        assert request.token_ids == [*answer, EOS]


def test_a_wrong_prediction_changes_no_text(llama: Pair):
    prompts = random_prompts(64, [12, 30], seed=3)
    for params in (
        SamplingParams(max_new_tokens=40),
        SamplingParams(max_new_tokens=40, temperature=1.0, seed=2, rule="coupled"),
    ):
        with Decoder.open(llama.bundle) as decoder:
            for prompt, other in (prompts, prompts[::-1]):
                [expected] = decoder.generate(prompt, params, draft_length=0)
                right = expected.token_ids
                half = (*right[:10], *other, *right[14:])
                for prediction in (other, right, half):
                    request = decoder.submit(prompt, params, prediction=prediction)
                    while decoder.step():
                        pass
                    assert tuple(request.token_ids) == right
                    if prediction is right:
                        assert request.speculation.rounds <= 5


@pytest.mark.parametrize("rule", ["rejection", "tokenwise"])
def test_what_a_seed_has_said_is_no_less_exact_as_its_prediction(eight: Pair, rule: str, monkeypatch):
    """The noise that made a text does not judge it: an edit of an earlier answer is distributed as any answer."""
    params = SamplingParams(temperature=1.0, rule=rule, max_new_tokens=4, ignore_eos=True)
    expected = exact_distribution(eight.exact, params, 3)

    def said(decoder: Decoder, predictions: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        requests = [
            decoder.submit(PROMPT, replace(params, seed=seed), draft_length=2, drafter="suffix", prediction=prediction)
            for seed, prediction in enumerate(predictions)
        ]
        while decoder.step():
            pass
        return [tuple(request.token_ids) for request in requests]

    def p_value() -> float:
        with Decoder.open(eight.bundle, max_batch=256) as decoder:
            again = said(decoder, said(decoder, [()] * 1500))
        return tail(*statistic(Counter(tokens[1:] for tokens in again), expected))

    assert p_value() > FALSE_ALARM
    monkeypatch.setattr(Request, "noise_seed", property(lambda request: request.seed))
    assert p_value() < FALSE_ALARM, "the test would see it"


def test_no_other_drafter_is_asked_for_beside_a_prediction(llama: Pair):
    with Decoder.open(llama.bundle) as decoder:
        with pytest.raises(RequestError, match="drafter is 'model', but a prediction is copied by suffix"):
            decoder.submit([1, 2], prediction=[3, 4], drafter="model")
        with pytest.raises(RequestError, match="token id 99999 is outside the vocabulary"):
            decoder.submit([1, 2], prediction=[99999])
