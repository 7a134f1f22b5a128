"""Sound files become one channel of 16,000 samples a second, or are refused in a sentence."""

import os
import random
import stat
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from struct import pack

import numpy as np
import pytest
import torch
from trt_spec.engines import RequestError
from trt_spec.tools.sound_files import MOST_PHASES, at_our_rate, read_sound, sound_of

from ..kit.sounds import RATE, tone, wav


@pytest.mark.parametrize("rate", [8000, 16_000, 22_050, 44_100, 48_000])
@pytest.mark.parametrize(("width", "channels"), [(1, 1), (2, 2), (3, 1), (4, 2)])
def test_wav_files_of_any_width_and_rate_are_the_same_tone(
    tmp_path: Path, rate: int, width: int, channels: int
) -> None:
    (tmp_path / "a.wav").write_bytes(wav(tone(rate), rate, width, channels))
    found, expected = read_sound(tmp_path / "a.wav"), torch.from_numpy(tone(RATE)).float()
    assert abs(len(found) - len(expected)) <= 1
    inner = slice(400, 7600)  # before the first sample and after the last there was silence
    assert float((found[inner] - expected[inner]).abs().max()) < (2e-2 if width == 1 else 2e-3)


def test_what_a_lower_rate_cannot_hold_is_left_out() -> None:
    high = torch.from_numpy(tone(48_000, hertz=12_000.0)).float()
    assert float(at_our_rate(high, 48_000)[400:-400].abs().max()) < 5e-3


def test_other_formats_are_read_by_ffmpeg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stand-in is a script that shows what it is called with."""
    script = tmp_path / "ffmpeg"
    script.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/called\nprintf "\\0\\0\\200\\077\\0\\0\\0\\0"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "a.mp3").write_bytes(b"ID3 and so on")
    assert read_sound(tmp_path / "a.mp3").tolist() == [1.0, 0.0]
    called = (tmp_path / "called").read_text()
    assert "-protocol_whitelist file -format_whitelist aac,flac,matroska,mov,mp3,ogg,wav" in called
    script.write_text("#!/bin/sh\necho 'Invalid data found' >&2\nexit 1\n")
    with pytest.raises(RequestError, match=r"a\.mp3 cannot be read by ffmpeg \(Invalid data found\)"):
        read_sound(tmp_path / "a.mp3")


def test_what_cannot_be_read_is_refused_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RequestError, match=r"cannot be read .No such file or directory.; give another"):
        read_sound(tmp_path / "none.wav")
    (tmp_path / "a.mp3").write_bytes(b"ID3 and so on")
    with pytest.raises(RequestError, match=r"is no WAV file of PCM .*, and ffmpeg, which reads others, is not"):
        read_sound(tmp_path / "a.mp3")
    (tmp_path / "empty.wav").write_bytes(wav(np.zeros(0), RATE, 2))
    with pytest.raises(RequestError, match="holds no sound"):
        read_sound(tmp_path / "empty.wav")


@pytest.mark.parametrize("rate", [11_025, 11_127, 15_999, 44_101])
def test_odd_rates_take_little_memory_and_are_the_same_tone(rate: int) -> None:
    found = at_our_rate(torch.from_numpy(tone(rate)).float(), rate)
    assert abs(len(found) - RATE // 2) <= 1
    inner = slice(400, 7600)
    assert float((found[inner] - torch.from_numpy(tone(RATE)).float()[inner]).abs().max()) < 5e-2
    taken = Fraction(rate, RATE).limit_denominator(MOST_PHASES)
    assert taken.denominator <= MOST_PHASES  # of a kernel with a row for each
    assert abs(float(taken) * RATE / rate - 1) < 1e-4  # a fifth of a second in an hour, at most


@pytest.mark.parametrize("rate", [1, 100, 3999, 384_001, 2**31 - 1])
def test_a_rate_that_no_sound_has_is_refused(tmp_path: Path, rate: int) -> None:
    (tmp_path / "a.wav").write_bytes(wav(tone(RATE, 0.01), RATE, 2).replace(pack("<I", RATE), pack("<I", rate), 1))
    with pytest.raises(RequestError, match=r"samples a second, expected 4,000 to 384,000"):
        read_sound(tmp_path / "a.wav")


def test_hours_of_sound_are_refused() -> None:
    with pytest.raises(RequestError, match=r"noise holds more than 0\.001 hours of sound; cut it into parts"):
        sound_of(wav(tone(RATE, 4.0), RATE, 2), "noise", most_hours=0.001)


def test_a_damaged_file_is_refused_in_a_sentence_or_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    whole, choose = wav(tone(RATE, 0.02), RATE, 2), random.Random(0)
    for _ in range(300):
        content = bytearray(whole[: choose.choice([len(whole), choose.randrange(len(whole))])])
        for _ in range(choose.randint(0, 4)):
            if content:
                content[choose.randrange(min(len(content), 48))] = choose.randrange(256)
        with suppress(RequestError):
            assert sound_of(bytes(content), "noise").dim() == 1
