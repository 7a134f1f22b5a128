"""What transformers hears in sound of any length, and sound to be heard."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSpeechSeq2Seq
from trt_spec.runtime.sources.log_mel import SAMPLE_RATE, log_mel, one_window, samples_of

from .source_models import SOUND

Heard = tuple[float, float, list[int]]  # a segment: from when to when, and its tokens


def sound(seconds: float, seed: int = 0) -> torch.Tensor:
    return 0.1 * torch.randn(round(seconds * SAMPLE_RATE), generator=torch.Generator().manual_seed(seed))


def by_transformers(checkpoint: Path, samples: torch.Tensor, **options: Any) -> list[Heard]:
    model = AutoModelForSpeechSeq2Seq.from_pretrained(checkpoint, dtype=torch.float32).eval()
    short = len(samples) <= samples_of(SOUND)
    picture = one_window(samples, SOUND) if short else log_mel(samples, SOUND.bands)
    options = {"do_sample": False, "num_beams": 1, "top_k": 0, "max_length": 128} | options
    found = model.generate(input_features=picture[None], return_segments=True, return_timestamps=True, **options)
    first_time = model.generation_config.no_timestamps_token_id + 1
    return [
        (round(float(one["start"]), 3), round(float(one["end"]), 3), _own(one["tokens"].tolist(), first_time))
        for one in found["segments"][0]
    ]


def _own(tokens: list[int], first_time: int) -> list[int]:
    """Return the tokens of a segment without the time that begins the next one."""
    return tokens[:-1] if len(tokens) > 2 and min(tokens[-2:]) >= first_time else tokens
