"""Read sound files as Whisper hears them: one channel, 16,000 samples a second."""

import io
import shutil
import subprocess
import tempfile
import wave
from math import ceil, gcd, pi
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
ZEROS = 16  # of the sinc on each side by which samples are taken at another rate
ROLL_OFF = 0.95  # of the lower rate's band that is kept


def read_sound(path: Path) -> Tensor:
    """Read a sound file."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RequestError(f"sound file {path} cannot be read ({error.strerror}); give another") from error
    return sound_of(content, f"sound file {path}")


def sound_of(content: bytes, name: str) -> Tensor:
    """Read the content of a WAV file of PCM by ourselves, and any other by ffmpeg, if that is installed."""
    try:
        with wave.open(io.BytesIO(content)) as file:
            return _samples(file, name)
    except (wave.Error, EOFError) as error:
        return _by_ffmpeg(content, name, error)


def _samples(file: wave.Wave_read, name: str) -> Tensor:
    channels, width, rate, frames, *_ = file.getparams()
    content = file.readframes(frames)
    content = content[: len(content) // (channels * width) * channels * width]  # of a file that was cut off
    if width == 3:
        whole = np.frombuffer(content, np.uint8).reshape(-1, 3)
        content, width = np.pad(whole, ((0, 0), (1, 0))).tobytes(), 4
    if not content or width not in WIDTHS:
        raise RequestError(f"{name} holds {frames} frames of {width} bytes, expected PCM; convert it first", "file")
    numbers = np.frombuffer(content, WIDTHS[width]).astype(np.float32).reshape(-1, channels).mean(1)
    middle, largest = (128, 128) if width == 1 else (0, 2 ** (8 * width - 1))
    return at_rate(torch.from_numpy((numbers - middle) / np.float32(largest)), rate)


def _by_ffmpeg(content: bytes, name: str, error: Exception) -> Tensor:
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
        command = [ffmpeg, *given, "-f", "f32le", "-ac", "1", "-ar", str(SAMPLE_RATE), "-"]
        try:
            done = subprocess.run(command, capture_output=True, check=False, timeout=MOST_SECONDS)
        except subprocess.TimeoutExpired as late:
            raise RequestError(f"{name} takes ffmpeg more than {MOST_SECONDS} s; convert it first", "file") from late
    if done.returncode or not done.stdout:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise RequestError(f"{name} cannot be read by ffmpeg ({said[-1] if said else 'it holds no sound'})", "file")
    return torch.from_numpy(np.frombuffer(done.stdout, "<f4").copy())


def at_rate(samples: Tensor, rate: int, wanted: int = SAMPLE_RATE) -> Tensor:
    """Take samples at another rate, without what lies above the lower one's band."""
    if rate == wanted:
        return samples
    common = gcd(rate, wanted)
    step, phases = rate // common, wanted // common  # so many samples give so many others
    band = ROLL_OFF * min(step, phases) / step  # of the rate that they have
    reach = ceil(ZEROS / band)
    places = torch.arange(-reach, reach + step, dtype=torch.float64)
    apart = (places - torch.arange(phases, dtype=torch.float64)[:, None] * step / phases) * band
    window = torch.cos(apart.clamp(-ZEROS, ZEROS) * pi / ZEROS / 2) ** 2
    kernel = (band * torch.sinc(apart) * window).float()[:, None]
    padded = torch.nn.functional.pad(samples, (reach, reach + step))
    found = torch.nn.functional.conv1d(padded[None, None], kernel, stride=step)[0]
    return found.T.reshape(-1)[: ceil(len(samples) * wanted / rate)]
