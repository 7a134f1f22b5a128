"""Windows are heard again, left out and heard in their context where transformers does so."""

from collections.abc import Sequence
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationMixin
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin
from trt_spec.engines import RequestError
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.requests.output import Output
from trt_spec.runtime.transcribing.fallback import Fallback, compression_ratio
from trt_spec.runtime.transcribing.hearing import Window
from trt_spec.runtime.transcribing.transcriber import Transcriber

from ...kit.listening import Heard, by_transformers, sound

COOL = 1e-4  # a temperature at which the likeliest token is drawn
SECONDS = 1.5
Contexts = list[tuple[float, list[int]]]  # the temperature and the tokens before each text


def heard(decoder: Decoder, samples: torch.Tensor, **options: Any) -> tuple[list[Heard], list[tuple[Window, Output]]]:
    """Return the segments, and all that was asked for meanwhile."""
    work, asked = Transcriber(decoder).work(samples, **options), list[tuple[Window, Output]]()
    window = next(work)
    while True:
        [output] = decoder.generate([window.prompt], window.params, sources=[window.source], drafter="lookup")
        asked.append((window, output))
        try:
            window = work.send(output)
        except StopIteration as ended:
            return [(one.start, one.end, list(one.token_ids)) for one in ended.value.segments], asked


def texts(asked: Sequence[tuple[Window, Output]]) -> Contexts:
    """Leave out what was asked about silence."""
    return [(one.params.temperature, one.prompt) for one, _ in asked if one.params.max_new_tokens > 1]


@pytest.fixture
def asked_there(monkeypatch: pytest.MonkeyPatch) -> Contexts:
    """What transformers asks for."""
    asked, generate = Contexts(), GenerationMixin.generate

    def noting(self: Any, *arguments: Any, **options: Any) -> Any:
        config = options["generation_config"]
        asked.append((config.temperature if config.do_sample else 0.0, options["decoder_input_ids"][0].tolist()))
        return generate(self, *arguments, **options)

    monkeypatch.setattr(GenerationMixin, "generate", noting)
    return asked


@pytest.fixture
def means_there(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The mean log-probabilities of the texts of transformers."""
    found, mean = list[float](), WhisperGenerationMixin._retrieve_avg_logprobs

    def noting(*arguments: Any) -> Any:
        found.append(float(mean(*arguments)))
        return torch.tensor(found[-1])

    monkeypatch.setattr(WhisperGenerationMixin, "_retrieve_avg_logprobs", staticmethod(noting))
    return found


def assert_alike(found: Sequence[Heard], expected: Sequence[Heard]) -> None:
    """Of a window without times transformers calculates the end in float32, and down to a time."""
    expected = [one for one in expected if one[2]]
    assert [(begin, tokens) for begin, _, tokens in found] == [(begin, tokens) for begin, _, tokens in expected]
    assert all(0 <= ours[1] - theirs[1] < 0.0201 for ours, theirs in zip(found, expected, strict=True))


def mean_logprob(output: Output) -> float:
    assert output.logprobs is not None
    return sum(one.logprob for one in output.logprobs) / len(output.logprobs)


def between(values: Sequence[float], share: float) -> float:
    """Return a number that no value is near, above such a share of them."""
    ordered = sorted(values)
    place = round(share * (len(ordered) - 1))
    above = next(one for one in ordered[place:] if one - ordered[place] > 1e-3)
    return (ordered[place] + above) / 2


@pytest.mark.parametrize(
    ("kind", "goes_on"),
    [
        pytest.param(kind, goes_on, marks=() if (kind == "silent") == goes_on else pytest.mark.exhaustive)
        for kind in ("unlikely", "repetitive", "silent")
        for goes_on in (False, True)
    ],
)
def test_windows_are_heard_again_and_left_out_where_transformers_does_so(
    listeners: Path, asked_there: Contexts, means_there: list[float], kind: str, goes_on: bool
) -> None:
    samples, options = sound(SECONDS, 1), {"language": "de", "task": "transcribe"}
    with Decoder.open(listeners / "several-bundle") as decoder:
        _, plain = heard(decoder, samples, **options, goes_on=goes_on, fallback=Fallback(logprob_threshold=-1000.0))
        outputs, thresholds = [output for _, output in plain], dict[str, float]()
        vocab = decoder.bundle.tokenizer.vocab_size
        if kind == "repetitive":
            ratios = [compression_ratio(one.token_ids, vocab) for one in outputs]
            thresholds["compression_ratio_threshold"] = between(ratios, 0.5)
        elif kind == "unlikely":
            thresholds["logprob_threshold"] = between([mean_logprob(one) for one in outputs], 0.6)
        else:
            unlikely = Fallback(logprob_threshold=0.0, no_speech_threshold=1.0)
            _, silences = heard(decoder, samples, **options, goes_on=goes_on, fallback=unlikely)
            likely = [mean_logprob(output) for window, output in silences if window.params.max_new_tokens == 1]
            thresholds |= {"logprob_threshold": 0.0, "no_speech_threshold": exp(between(likely, 0.5))}
        fallback = Fallback((COOL, 2 * COOL), **thresholds)
        found, asked = heard(decoder, samples, **options, fallback=fallback, goes_on=goes_on)
    expected = by_transformers(
        listeners / "several",
        samples,
        **options,
        **thresholds,
        temperature=(0.0, COOL, 2 * COOL),
        condition_on_prev_tokens=goes_on,
    )
    assert texts(asked) == asked_there
    assert_alike(found, expected)
    if kind != "repetitive":
        ours = [mean_logprob(output) for window, output in asked if window.params.max_new_tokens > 1]
        assert ours == pytest.approx(means_there, abs=1e-4), "of float32, and of what the rules leave"
    temperatures = [temperature for temperature, _ in texts(asked)]
    assert 0 < temperatures.count(COOL) < temperatures.count(0), "some windows are heard again, not all"
    if kind == "silent":
        assert temperatures.count(2 * COOL) == temperatures.count(COOL), "what is left out is not heard again"


@pytest.mark.parametrize(
    ("name", "goes_on", "prompt"),
    [
        ("several", False, []),
        ("english", True, []),
        ("several", True, [7, 8, 9]),
        ("english", False, [7, 8, 9]),
        ("several", False, [*range(7, 37)] * 3),
        ("english", True, [*range(7, 37)] * 3),
    ],
)
def test_what_was_said_before_stands_where_transformers_puts_it(
    listeners: Path, asked_there: Contexts, name: str, goes_on: bool, prompt: list[int]
) -> None:
    samples, options = sound(1.2, 2), {"language": "en"} if name == "several" else {}
    with Decoder.open(listeners / f"{name}-bundle") as decoder:
        before = decoder.tokenizer.token_to_id("<|startofprev|>")
        found, asked = heard(decoder, samples, **options, goes_on=goes_on, prompt=prompt)
    given = {"prompt_ids": torch.tensor([before, *prompt])} if prompt else {}
    expected = by_transformers(listeners / name, samples, **options, **given, condition_on_prev_tokens=goes_on)
    assert texts(asked) == asked_there
    assert_alike(found, expected)


def test_a_text_of_a_high_temperature_is_no_context(listeners: Path, asked_there: Contexts) -> None:
    samples, options = sound(1.2, 3), {"language": "en", "task": "transcribe"}
    never = {"logprob_threshold": 0.0}
    params = SamplingParams(seed=4)
    with Decoder.open(listeners / "several-bundle") as decoder:
        _, asked = heard(
            decoder, samples, **options, params=params, fallback=Fallback((0.4, 0.6), **never), goes_on=True
        )
        _, again = heard(decoder, samples, **options, params=params, fallback=Fallback((0.4,), **never), goes_on=True)
    by_transformers(
        listeners / "several", samples, **options, **never, temperature=(0.0, 0.4, 0.6), condition_on_prev_tokens=True
    )
    assert texts(asked)[:6] == asked_there[:6], "nothing is good enough: the second window has no context"
    assert len({len(prompt) for _, prompt in texts(asked)}) == 1
    assert len({len(prompt) for _, prompt in texts(again)}) > 1
    seeds = [window.params.seed for window, _ in asked]
    assert len(seeds) == len(set(seeds)), "each text has noise of its own"


def test_a_prompt_of_text_is_read_as_transformers_reads_it_up_to_what_whisper_keeps(listeners: Path) -> None:
    with Decoder.open(listeners / "english-bundle") as decoder:
        text = "".join(decoder.tokenizer.id_to_token(token) for token in range(7, 12))
        [(window, _), *_] = heard(decoder, sound(0.5), prompt=f" {text} ")[1]
        before, start = (decoder.tokenizer.token_to_id(f"<|{name}|>") for name in ("startofprev", "startoftranscript"))
        assert [token for token in window.prompt if token >= 7] == [before, *range(7, 12), start]
        [(window, _), *_] = heard(decoder, sound(0.5), prompt=text * 30)[1]
        assert len(window.prompt) == 1 + decoder.bundle.max_length // 2 - 1 + 1
        [(window, _), *_] = heard(decoder, sound(0.5), prompt=" ")[1]
        assert window.prompt == [start]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"prompt": "<|en|>"}, r"the prompt has the special token <\|en\|>, expected plain text"),
        ({"prompt": [7] * 123}, "the prompt has 123 tokens, expected at most 122"),
        ({"prompt": [1000]}, "prompt token id 1000 is outside the vocabulary"),
    ],
)
def test_a_prompt_that_cannot_be_read_is_refused(listeners: Path, options: dict[str, Any], reason: str) -> None:
    with Decoder.open(listeners / "several-bundle") as decoder, pytest.raises(RequestError, match=reason):
        Transcriber(decoder).transcribe(sound(0.5), **options)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"no_speech_threshold": 0.6}, "no_speech_threshold is for texts below logprob_threshold, which is not there"),
        ({"temperatures": (-1.0,)}, "temperatures is -1.0, expected numbers from 0 to 100"),
        ({"logprob_threshold": float("nan")}, "logprob_threshold is nan, expected a number"),
    ],
)
def test_thresholds_that_make_no_sense_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        Fallback(**settings)
