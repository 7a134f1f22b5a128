"""Read sound files as Whisper hears them: one channel, 16,000 samples a second."""

import io
import shutil
import subprocess
import tempfile
import wave
from fractions import Fraction
from math import ceil, pi
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..engines import RequestError
from ..runtime.sources.log_mel import SAMPLE_RATE

WIDTHS: dict[int, "np.dtype[Any]"] = {  # of PCM by bytes; three are the upper of four
    1: np.dtype("u1"),
    2: np.dtype("<i2"),
    4: np.dtype("<i4"),
}
READ = "aac,flac,matroska,mov,mp3,ogg,wav"  # ffmpeg's names; mov is MP4 and M4A, too, and matroska WebM
MOST_SECONDS = 60  # for ffmpeg
MOST_HOURS = 12.0
RATES = 4000, 384_000
MOST_PHASES = 640  # as 11,025 samples a second take
ZEROS = 16  # of the sinc on each side by which samples are taken at another rate
ROLL_OFF = 0.95  # of the lower rate's band that is kept


def read_sound(path: Path) -> Tensor:
    """Read a sound file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RequestError(f"sound file {path} cannot be read ({error.strerror}); give another") from error
    return sound_of(content, f"sound file {path}")


def sound_of(content: bytes, name: str, most_hours: float = MOST_HOURS) -> Tensor:
    """Read the content of a WAV file of PCM by ourselves, and any other by ffmpeg, if that is installed."""
    try:
        with wave.open(io.BytesIO(content)) as file:
            channels, width, rate, frames, *_ = file.getparams()
            samples = file.readframes(frames)
    except (wave.Error, EOFError, RuntimeError) as error:  # the last where a part is longer than the file
        return _by_ffmpeg(content, name, error, most_hours)
    if not RATES[0] <= rate <= RATES[1]:
        raise RequestError(f"{name} has {rate:,} samples a second, expected {RATES[0]:,} to {RATES[1]:,}", "file")
    _refuse_long(len(samples) / (channels * width) / rate, name, most_hours)
    return at_our_rate(_numbers(samples, channels, width, name), rate)


def _numbers(content: bytes, channels: int, width: int, name: str) -> Tensor:
    """Return one channel of numbers from -1 to 1."""
    content = content[: len(content) // (channels * width) * channels * width]  # of a file that was cut off
    if not content:
        raise RequestError(f"{name} holds no sound", "file")
    if width == 3:
        whole = np.frombuffer(content, np.uint8).reshape(-1, 3)
        content, width = np.pad(whole, ((0, 0), (1, 0))).tobytes(), 4
    if width not in WIDTHS:
        raise RequestError(f"{name} has samples of {width} bytes, expected 1 to 4; convert it first", "file")
    numbers = np.frombuffer(content, WIDTHS[width]).astype(np.float32).reshape(-1, channels).mean(1)
    middle, largest = (128, 128) if width == 1 else (0, 2 ** (8 * width - 1))
    return torch.from_numpy((numbers - middle) / np.float32(largest))


def _refuse_long(seconds: float, name: str, most_hours: float) -> None:
    if seconds > 3600 * most_hours:
        raise RequestError(f"{name} holds more than {most_hours:g} hours of sound; cut it into parts", "file")


def _by_ffmpeg(content: bytes, name: str, error: Exception, most_hours: float) -> Tensor:
    """Let it read nothing but the file, in a format that names no other files."""
    if (ffmpeg := shutil.which("ffmpeg")) is None:
        raise RequestError(
            f"{name} is no WAV file of PCM ({error}), and ffmpeg, which reads others, is not installed; install it, or "
            "convert the file",
            "file",
        ) from error
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        given = ["-nostdin", "-v", "error", "-protocol_whitelist", "file", "-format_whitelist", READ, "-i", file.name]
        most = ["-t", str(3600 * most_hours + 1)]
        command = [ffmpeg, *given, *most, "-f", "f32le", "-ac", "1", "-ar", str(SAMPLE_RATE), "-"]
        try:
            done = subprocess.run(command, capture_output=True, check=False, timeout=MOST_SECONDS)
        except subprocess.TimeoutExpired as late:
            raise RequestError(f"{name} takes ffmpeg more than {MOST_SECONDS} s; convert it first", "file") from late
    if done.returncode or not done.stdout:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise RequestError(f"{name} cannot be read by ffmpeg ({said[-1] if said else 'it holds no sound'})", "file")
    _refuse_long(len(done.stdout) / 4 / SAMPLE_RATE, name, most_hours)
    return torch.from_numpy(np.frombuffer(bytearray(done.stdout), "<f4"))


def at_our_rate(samples: Tensor, rate: int) -> Tensor:
    """Take samples at the rate that encoders read, without what lies above the lower one's band."""
    if rate == SAMPLE_RATE:
        return samples
    taken = Fraction(rate, SAMPLE_RATE).limit_denominator(MOST_PHASES)  # of an odd rate one that is nearly it
    step, phases = taken.numerator, taken.denominator  # so many samples give so many others
    band = ROLL_OFF * min(step, phases) / step  # of the rate that they have
    reach = ceil(ZEROS / band)
    places = torch.arange(-reach, reach + step, dtype=torch.float64)
    apart = (places - torch.arange(phases, dtype=torch.float64)[:, None] * step / phases) * band
    window = torch.cos(apart.clamp(-ZEROS, ZEROS) * pi / ZEROS / 2) ** 2
    kernel = (band * torch.sinc(apart) * window).float()[:, None]
    padded = torch.nn.functional.pad(samples, (reach, reach + step))
    found = torch.nn.functional.conv1d(padded[None, None], kernel, stride=step)[0]
    return found.T.reshape(-1)[: ceil(len(samples) * SAMPLE_RATE / rate)]
