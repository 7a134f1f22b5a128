"""Sound as Whisper's encoders take it: the logarithm of what each of some bands of mel holds, frame by frame."""

from functools import lru_cache

import torch
from torch import Tensor

from ...engines import Sound

SAMPLE_RATE = 16_000  # per second
WINDOW, HOP = 400, 160  # samples: a frame looks at 25 ms, and the next begins 10 ms later
LINEAR_HZ, LINEAR_MELS = 1000.0, 15.0  # below, mels are even in Hz; above, in the logarithm of Hz,
PER_OCTAVE = 27 / torch.tensor(6.4).log().item()  # of which so many are a unit
AT_ONCE = 3000  # frames, of a spectrum that takes much memory
QUIETEST, RANGE = 1e-10, 8.0  # of the loudest, so many powers of ten are distinguished


def samples_of(sound: Sound) -> int:
    """Return how many samples an encoder hears at a time."""
    return sound.frames * HOP


def log_mel(samples: Tensor, bands: int) -> Tensor:
    """Return the picture [bands, frames] of sound. How loud its frames are is measured by the loudest of all."""
    frames, window = len(samples) // HOP, torch.hann_window(WINDOW)
    around = torch.nn.functional.pad(samples[None], (WINDOW // 2, WINDOW // 2), mode="reflect")[0]
    parts = []
    for begin in range(0, frames, AT_ONCE):
        end = min(frames, begin + AT_ONCE)
        part = around[begin * HOP : (end - 1) * HOP + WINDOW]
        spectrum = torch.stft(part, WINDOW, HOP, window=window, center=False, return_complex=True)
        parts.append((_filters(bands) @ spectrum.abs().square()).clamp(min=QUIETEST).log10())
    picture = torch.cat(parts, 1)
    return (torch.maximum(picture, picture.max() - RANGE) + 4) / 4


def one_window(samples: Tensor, sound: Sound) -> Tensor:
    """Return the picture of samples that silence follows up to the length of an encoder's window."""
    return log_mel(torch.nn.functional.pad(samples, (0, samples_of(sound) - len(samples))), sound.bands)


@lru_cache
def _filters(bands: int) -> Tensor:
    """Return what each frequency gives to each band [bands, WINDOW / 2 + 1]: triangles of one area, even in mels."""
    hertz = torch.linspace(0, SAMPLE_RATE / 2, WINDOW // 2 + 1, dtype=torch.float64)
    corners = _hertz(torch.linspace(0, float(_mels(hertz[-1])), bands + 2, dtype=torch.float64))
    lower, middle, upper = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    rising, falling = (hertz - lower) / (middle - lower), (upper - hertz) / (upper - middle)
    return (torch.minimum(rising, falling).clamp(min=0) * 2 / (upper - lower)).float()


def _mels(hertz: Tensor) -> Tensor:
    above = LINEAR_MELS + PER_OCTAVE * (hertz / LINEAR_HZ).log()
    return torch.where(hertz < LINEAR_HZ, hertz * LINEAR_MELS / LINEAR_HZ, above)


def _hertz(mels: Tensor) -> Tensor:
    above = LINEAR_HZ * ((mels - LINEAR_MELS) / PER_OCTAVE).exp()
    return torch.where(mels < LINEAR_MELS, mels * LINEAR_HZ / LINEAR_MELS, above)
