"""The source of a text: the tokens of another, or sound."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from ...engines import EncoderContract, RequestError, Sound
from .log_mel import SAMPLE_RATE, one_window, samples_of


@dataclass(frozen=True, eq=False)
class Source:
    """A source as encoders read it."""

    ids: tuple[int, ...] = ()
    pictures: Mapping[Sound, Tensor] = field(default_factory=dict)  # of sound: its bands over time [bands, frames]

    @cached_property
    def digest(self) -> str:
        """A name that distinguishes it from others, by all that encoders read."""
        found = sha256(b"".join(token.to_bytes(4, "little") for token in self.ids))
        for picture in self.pictures.values():
            found.update(picture.numpy().tobytes())
        return found.hexdigest()


def read_source(
    given: Any, contracts: Sequence[EncoderContract], vocab_size: int, tokenizer: Tokenizer | None = None
) -> Source:
    """Make the source that all these encoders read: of text or token ids, or of samples of sound; or take one."""
    if isinstance(given, Source):
        return given
    sounds = {one.sound for one in contracts if one.sound is not None}
    if sounds:
        return Source(pictures={sound: one_window(_samples(given, sound), sound) for sound in sounds})
    ids = tokenizer.encode(given).ids if tokenizer is not None and isinstance(given, str) else given
    if isinstance(ids, str) or not isinstance(ids, Sequence) or not all(type(token) is int for token in ids):
        raise RequestError(f"the source is {_kind(given)}, expected text or a list of token ids", "source")
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError(f"source token id {token} is outside the vocabulary of {vocab_size} tokens", "source")
    longest = min(one.longest for one in contracts)
    if not ids or len(ids) > longest:
        raise RequestError(f"the source has {len(ids):,} tokens, expected 1 to {longest:,}", "source")
    return Source(tuple(ids))


def _samples(given: Any, sound: Sound) -> Tensor:
    if isinstance(given, str | bytes):
        raise RequestError(
            f"the source is {_kind(given)}, expected samples of sound, {SAMPLE_RATE:,} a second, from -1 to 1", "source"
        )
    try:
        samples = torch.as_tensor(given, dtype=torch.float32).cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise RequestError(f"the source is {_kind(given)}, expected samples of sound ({error})", "source") from error
    if samples.dim() != 1 or not samples.isfinite().all():
        raise RequestError(
            f"the source has samples {list(samples.shape)}, expected one channel of finite numbers", "source"
        )
    most = samples_of(sound)
    if not 1 <= len(samples) <= most:
        raise RequestError(
            f"the source has {len(samples) / SAMPLE_RATE:.2f} s of sound, expected at most {most / SAMPLE_RATE:g} s; "
            "trt-spec transcribe takes longer ones piece by piece",
            "source",
        )
    return samples


def _kind(given: object) -> str:
    return f"a {type(given).__name__}"
