"""The command writes what the library hears, in the format that was asked for."""

import json
import re
from pathlib import Path

import pytest
import torch
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.transcribing.fallback import Fallback
from trt_spec.runtime.transcribing.transcriber import Transcriber
from trt_spec.runtime.transcribing.transcript import Segment, Transcript
from trt_spec.tools.sound_files import read_sound
from trt_spec.tools.transcripts import FORMATS

from ...kit.bundles import export_pair
from ...kit.sounds import wav
from ...kit.source_models import tiny_listener, tiny_with_source
from ..conftest import assert_refused


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("listener")
    export_pair(tiny_listener(folder / "several"), folder / "bundle")
    noise = torch.randn(16_000, generator=torch.Generator().manual_seed(0)).numpy() / 10
    (folder / "a.wav").write_bytes(wav(noise, 16_000, 2))
    return folder


@pytest.fixture
def transcribe(run, listener):
    return lambda *arguments: run("transcribe", listener / "a.wav", "--bundle", listener / "bundle", *arguments)


def test_it_writes_what_the_library_hears(transcribe, listener):
    result = transcribe("--language", "de", "--translate", "--format", "json", "--drafter", "lookup")
    assert result.code == 0
    with Decoder.open(listener / "bundle") as decoder:
        sound = read_sound(listener / "a.wav")
        expected = Transcriber(decoder).transcribe(sound, language="de", task="translate")
    found = json.loads(result.out)
    assert found == json.loads(FORMATS["json"](expected))
    assert (found["text"], found["language"], found["duration"]) == (expected.text, "de", 1.0)
    assert re.search(r"a\.wav: 1\.0 s; \d+% of examined proposals accepted", result.err)


def test_it_reads_a_prompt_and_hears_again_as_the_library_does(transcribe, listener):
    prompt = "\u4e07\u4e08"
    flags = ("--prompt", prompt, "--condition-on-prev-tokens", "--temperature", 0.9, "--seed", 3)
    result = transcribe(*flags, "--language", "de", "--logprob-threshold", 0, "--no-speech-threshold", 1)
    with Decoder.open(listener / "bundle") as decoder:
        expected = Transcriber(decoder).transcribe(
            read_sound(listener / "a.wav"),
            language="de",
            params=SamplingParams(temperature=0.9, seed=3),
            fallback=Fallback((1.0,), 1.35, 0.0, 1.0),
            prompt=prompt,
            goes_on=True,
        )
    assert expected.text
    assert (result.code, result.out) == (0, expected.text + "\n")
    plain = transcribe("--language", "de").out
    assert transcribe("--language", "de", "--prompt", prompt).out != plain
    good = ("--logprob-threshold", -1000, "--compression-ratio-threshold", 1000)
    assert transcribe("--language", "de", "--fallback", *good).out == plain


def test_it_writes_a_file_for_each_sound_and_shows_what_comes(run, transcribe, listener, tmp_path):
    result = transcribe("--language", "en", "--format", "srt", "--out", tmp_path)
    assert (result.code, result.out) == (0, "")
    assert (tmp_path / "a.srt").read_text().startswith("1\n00:00:00,")
    assert re.search(r"\[00:00:00\.\d{3} --> 00:00:0\d\.\d{3}\] ", result.err)


def test_the_formats_are_what_players_read():
    segments = (Segment(0.0, 1.5, " One & two", (1,)), Segment(3599.9996, 3661.25, " a --> b", (2,)))
    transcript = Transcript("One & two a --> b", "en", 3661.25, segments, None)
    assert FORMATS["txt"](transcript) == "One & two a --> b\n"
    assert FORMATS["srt"](transcript) == (
        "1\n00:00:00,000 --> 00:00:01,500\nOne & two\n\n2\n01:00:00,000 --> 01:01:01,250\na --> b\n"
    )
    assert FORMATS["vtt"](transcript) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nOne &amp; two\n\n01:00:00.000 --> 01:01:01.250\na --&gt; b\n"
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--language", "xx"), "language is 'xx', this model knows de, en"),
        (("--prompt", "<|de|>"), "the prompt has the special token <|de|>, expected plain text"),
        (("--logprob-threshold", "nan"), "logprob_threshold is nan, expected a number from -1,000 to 1,000"),
        (("--out", "/nowhere"), "--out /nowhere is no directory; make it first"),
    ],
)
def test_what_cannot_be_is_refused(transcribe, arguments, reason):
    assert_refused(transcribe(*arguments), reason)


def test_what_the_tokenizer_does_not_know_is_refused_before_the_bundle_is_opened(transcribe, monkeypatch):
    monkeypatch.setattr(Decoder, "open", None)
    assert_refused(transcribe("--language", "xx"), "language is 'xx', this model knows de, en")


def test_several_files_that_cannot_be_told_apart_are_refused(run, listener, tmp_path):
    bundle, file = ("--bundle", listener / "bundle"), listener / "a.wav"
    assert_refused(run("transcribe", file, file, *bundle, "--out", tmp_path), "two files would become a.txt")
    assert_refused(run("transcribe", file, file, *bundle, "--format", "vtt"), "vtt of several files is none of one")
    assert_refused(run("transcribe", file, tmp_path / "b.wav", *bundle), "b.wav is not there; name another")


def test_a_bundle_that_does_not_hear_is_refused(run, llama, listener):
    result = run("transcribe", listener / "a.wav", "--bundle", llama.bundle)
    assert_refused(result, "the bundle does not hear as Whisper does")


def test_generate_stands_behind_a_source(run, tmp_path):
    export_pair(tiny_with_source("t5", tmp_path / "checkpoint"), tmp_path / "bundle")
    (tmp_path / "source").write_text("abc")
    few = ("--bundle", tmp_path / "bundle", "--max-new-tokens", 8, "--ignore-eos")
    with Decoder.open(tmp_path / "bundle") as decoder:
        expected = decoder.generate(sources=["abc"])[0].text
    for source in (("--source", "abc"), ("--source-file", tmp_path / "source")):
        result = run("generate", *few, *source)
        assert expected.startswith(result.out.rstrip("\n"))
        assert result.out.strip()
    assert_refused(run("generate", *few, "--prompt", "a"), "needs a source; give one")
    both = ("--source", "abc", "--source-file", tmp_path / "source")
    assert_refused(run("generate", *few, *both), "--source and --source-file both say")
