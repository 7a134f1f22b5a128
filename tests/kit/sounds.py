"""Tones, and sound as WAV files of any width."""

import io
import wave

import numpy as np

RATE = 16_000


def tone(rate: int, seconds: float = 0.5, hertz: float = 440.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(rate * seconds)) / rate)


def wav(samples: np.ndarray, rate: int, width: int, channels: int = 1) -> bytes:
    whole = np.repeat(samples[:, None], channels, 1)
    if width == 1:
        content = (whole * 127 + 128).astype(np.uint8).tobytes()
    elif width == 3:
        content = (whole * (2**31 - 1)).astype("<i4").view(np.uint8).reshape(*whole.shape, 4)[..., 1:].tobytes()
    else:
        content = (whole * (2 ** (8 * width - 1) - 1)).astype(f"<i{width}").tobytes()
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(content)
    return out.getvalue()
