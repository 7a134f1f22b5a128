"""When a window is heard again at a higher temperature and when it holds no speech, by the thresholds of Whisper."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log2

from ...engines import RequestError
from ..acceptance.checks import real, require

WARM = 0.5  # the temperature from which on a text is no context for the next window


@dataclass(frozen=True)
class Fallback:
    """The temperatures to go on with, one after another, and what is not good enough; None: anything is."""

    temperatures: tuple[float, ...] = ()
    compression_ratio_threshold: float | None = None  # a text that says the same again and again is smaller compressed
    logprob_threshold: float | None = None  # the mean log-probability of its tokens
    no_speech_threshold: float | None = None  # a text below `logprob_threshold` is left out if silence is likelier

    def __post_init__(self) -> None:
        for one in self.temperatures:
            require("temperatures", one, real(one, 0, 100), "numbers from 0 to 100")
        for name in ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold"):
            value = getattr(self, name)
            require(name, value, value is None or real(value, -1000, 1000), "a number from -1,000 to 1,000")
        if self.no_speech_threshold is not None and self.logprob_threshold is None:
            raise RequestError(
                "no_speech_threshold is for texts below logprob_threshold, which is not there; give both",
                "no_speech_threshold",
            )

    @property
    def weighs(self) -> bool:
        """Whether it needs the log-probabilities of a text."""
        return self.logprob_threshold is not None

    def unlikely(self, logprobs: Sequence[float]) -> bool:
        return self.logprob_threshold is not None and sum(logprobs) / len(logprobs) < self.logprob_threshold

    def repetitive(self, tokens: Sequence[int], vocab_size: int) -> bool:
        threshold = self.compression_ratio_threshold
        return threshold is not None and compression_ratio(tokens, vocab_size) > threshold


NONE = Fallback()
USUAL = Fallback((0.2, 0.4, 0.6, 0.8, 1.0), 1.35, -1.0, 0.6)  # as transformers' documentation has them


def usual_above(temperature: float) -> Fallback:
    """Return the usual fallback of texts that begin with such a temperature."""
    return replace(USUAL, temperatures=tuple(one for one in USUAL.temperatures if one > temperature))


def compression_ratio(tokens: Sequence[int], vocab_size: int) -> float:
    """Return how many times smaller the bytes of these tokens are once compressed."""
    width = int(log2(vocab_size) / 8) + 1
    whole = b"".join(token.to_bytes(width, "little") for token in tokens)
    return len(whole) / len(zlib.compress(whole))
