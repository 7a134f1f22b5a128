"""Sound of any length is written down as transformers writes it down, whatever is drafted."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSpeechSeq2Seq
from trt_spec.engines import RequestError
from trt_spec.runtime import Decoder
from trt_spec.runtime.sources.log_mel import one_window
from trt_spec.runtime.transcribing.transcriber import Transcriber
from trt_spec.runtime.transcribing.transcript import Segment, cuts

from ...kit.listening import by_transformers, sound
from ...kit.source_models import SOUND


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 8))])
@pytest.mark.parametrize("seconds", [0.4, 0.6, 4.05])
@pytest.mark.parametrize("name", ["several", "english"])
def test_segments_and_times_are_those_of_transformers(listeners: Path, name: str, seconds: float, seed: int) -> None:
    samples = sound(seconds, seed)
    options = {"language": "de", "task": "translate"} if name == "several" else {}
    expected = by_transformers(listeners / name, samples, **options)
    with Decoder.open(listeners / f"{name}-bundle") as decoder:
        for drafting in ({"draft_length": 0}, {"drafter": "lookup", "draft_length": 3}):
            found = Transcriber(decoder).transcribe(samples, **options, **drafting)
            assert found.segments
            ours = [(one.start, one.end, list(one.token_ids)) for one in found.segments]
            assert ours == expected


def test_trees_combs_and_several_lines_change_nothing_of_what_is_heard(listeners: Path) -> None:
    with Decoder.open(listeners / "several-bundle") as decoder:
        transcriber, samples = Transcriber(decoder), sound(1.5)
        plain = transcriber.transcribe(samples, draft_length=0)
        for drafter, length in (("model", "3/6"), ("model", "3+3"), ("model+lookup", 3)):
            found = transcriber.transcribe(samples, drafter=drafter, draft_length=length)
            assert found.segments == plain.segments, (drafter, length)
            assert found.speculation.rounds < 0.8 * plain.speculation.rounds


@pytest.mark.parametrize("seed", range(3))
def test_a_language_that_is_not_named_is_the_one_that_transformers_hears(listeners: Path, seed: int) -> None:
    samples = sound(0.5, seed)
    model = AutoModelForSpeechSeq2Seq.from_pretrained(listeners / "several", dtype=torch.float32).eval()
    expected = int(model.detect_language(input_features=one_window(samples, SOUND)[None])[0])
    with Decoder.open(listeners / "several-bundle") as decoder:
        transcriber = Transcriber(decoder)
        language = transcriber.transcribe(samples).language
    assert language is not None
    assert transcriber.tokens.languages[language] == expected


def test_without_times_a_window_is_one_segment_and_pieces_come_as_they_are_heard(listeners: Path) -> None:
    came: list[Segment] = []
    with Decoder.open(listeners / "english-bundle") as decoder:
        plain = Transcriber(decoder).transcribe(sound(0.5), timed=False)
        long = Transcriber(decoder).transcribe(sound(2.0), timed=False, on_segment=came.append)
    [segment] = plain.segments
    assert (segment.start, segment.end, plain.seconds) == (0.0, 0.5, 0.5)
    assert plain.text == segment.text.strip()
    assert "<|" not in plain.text
    assert tuple(came) == long.segments
    assert len(came) > 1  # which takes times
    assert long.speculation.rounds > 0


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("english", {"task": "translate"}, "task is 'translate', expected transcribe, as it knows English alone"),
        ("english", {"language": "de"}, "language is 'de', this model knows en alone"),
        ("several", {"task": "sing"}, "task is 'sing', expected transcribe or translate"),
        ("several", {"language": "xx"}, "language is 'xx', this model knows de, en"),
        ("several", {"samples": [[0.0]]}, "expected one channel of finite numbers"),
        ("several", {"samples": [0.0] * 10}, "the sound is too short: it has 10 samples, expected at least 160"),
        ("several", {"samples": "sound"}, "the sound is a str, expected samples"),
    ],
)
def test_what_cannot_be_heard_is_refused_by_name(listeners: Path, name: str, options: dict, reason: str) -> None:
    with Decoder.open(listeners / f"{name}-bundle") as decoder, pytest.raises(RequestError, match=reason):
        Transcriber(decoder).transcribe(options.pop("samples", sound(0.5)), **options)


def test_a_bundle_that_does_not_hear_is_refused(llama) -> None:
    with Decoder.open(llama.bundle) as decoder, pytest.raises(RequestError, match="does not hear as Whisper does"):
        Transcriber(decoder)


def test_a_window_is_cut_where_two_times_meet() -> None:
    def places(tokens: list[int]) -> tuple[list[tuple[float, float]], float | None]:
        found, end = cuts(tokens, 100, 30)
        return [(one.start, one.end) for one in found], end

    assert places([100, 1, 105, 105, 2, 112, 112]) == ([(0, 5), (5, 12)], 12)  # and the text goes on at 12
    assert places([100, 1, 105, 105, 2, 112]) == ([(0, 5), (5, 12)], None)  # silence follows
    assert places([100, 1, 105, 105, 2]) == ([(0, 5)], 5)  # what is not ended is heard again
    assert places([100, 1, 105]) == ([(0, 5)], None)
    assert places([100, 1]) == ([(0, 30)], None)
    assert places([]) == ([(0, 30)], None)
