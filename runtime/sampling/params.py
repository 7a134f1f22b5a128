"""What a request asks for: every field means under speculation exactly what it means without."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...engines import RequestError

MAX_LOGPROBS = 20
RULES = ("rejection", "coupled")
# Scores are float32 and must stay finite whatever a request multiplies, adds and divides.
TEMPERATURES = (1e-5, 1e5)
REPETITIONS = (1e-3, 1e3)
LARGEST = 1e6


@dataclass(frozen=True)
class SamplingParams:
    """Validated once, here; see `HELP` for each field."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    draft_temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    rule: str = "rejection"
    lenience: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        _require("max_new_tokens", self.max_new_tokens, _whole(self.max_new_tokens, 1), "a whole number >= 1")
        cold, hot = TEMPERATURES
        for name in ("temperature", "draft_temperature"):
            value = getattr(self, name)
            sensible = _real(value, 0, hot) and (value == 0 or value >= cold)
            absent = name == "draft_temperature" and value is None
            _require(name, value, sensible or absent, f"0 or a number from {cold:g} to {hot:g}")
        _require("top_k", self.top_k, _whole(self.top_k, 0), "a whole number >= 0 (0 = off)")
        _require("top_p", self.top_p, _real(self.top_p, 0, 1) and self.top_p > 0, "a number in (0, 1]")
        _require("min_p", self.min_p, _real(self.min_p, 0, 1), "a number in [0, 1]")
        low, high = REPETITIONS
        repetition = self.repetition_penalty
        _require("repetition_penalty", repetition, _real(repetition, low, high), f"a number from {low:g} to {high:g}")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(name, value, _real(value, -LARGEST, LARGEST), f"a number from {-LARGEST:g} to {LARGEST:g}")
        _require(
            "logit_bias",
            self.logit_bias,
            isinstance(self.logit_bias, Mapping)
            and all(
                _whole(key, 0) and (_real(value, -LARGEST, LARGEST) or value == -math.inf)
                for key, value in self.logit_bias.items()
            ),
            f"a mapping of token ids to -inf or numbers from {-LARGEST:g} to {LARGEST:g}",
        )
        stop = self.stop
        strings = isinstance(stop, Sequence) and all(isinstance(text, str) and text for text in stop)
        _require("stop", stop, strings, "a list of strings, none empty")
        ids = self.stop_token_ids
        _require(
            "stop_token_ids",
            ids,
            isinstance(ids, Sequence) and all(_whole(i, 0) for i in ids),
            "a list of token ids",
        )
        _require("ignore_eos", self.ignore_eos, isinstance(self.ignore_eos, bool), "true or false")
        _require(
            "seed",
            self.seed,
            self.seed is None or _whole(self.seed, 0, 2**64 - 1),
            "a whole number below 2^64",
        )
        _require(
            "logprobs",
            self.logprobs,
            self.logprobs is None or _whole(self.logprobs, 0, MAX_LOGPROBS),
            f"a whole number from 0 to {MAX_LOGPROBS}",
        )
        _require("rule", self.rule, self.rule in RULES, f"one of {', '.join(RULES)}")
        _require("lenience", self.lenience, _real(self.lenience, 0, 1) and self.lenience > 0, "a number in (0, 1]")
        if self.lenient and self.rule == "coupled":
            raise RequestError(
                f"lenience {self.lenience} accepts what the draft says and rule coupled keeps one text whatever it "
                "says; choose rule rejection, or lenience 1"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def lenient(self) -> bool:
        """Lossy: the output is not distributed as the target's."""
        return self.lenience < 1

    @property
    def filtered(self) -> bool:
        """Whether top-k, top-p and min-p matter: a greedy pick passes them all."""
        return not self.greedy or self.lenient

    @property
    def own_draft_temperature(self) -> float:
        """Of the draft, the request's own unless another was asked for; a greedy pick is the same at all."""
        return self.temperature if self.greedy or self.draft_temperature is None else self.draft_temperature

    @property
    def keeps_its_draft(self) -> bool:
        """Whether the draft decides on the text while the same text is promised: then nothing else may decide on it."""
        draft_decides = self.lenient or (not self.greedy and self.rule == "rejection")
        return draft_decides and (self.greedy or self.seed is not None)

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


HELP = {
    "max_new_tokens": "stop after this many tokens",
    "temperature": "0 is greedy",
    "draft_temperature": "temperature of the draft; 0 proposes its likeliest token (default: the request's own)",
    "top_k": "keep the k likeliest tokens (0 = off)",
    "top_p": "keep the smallest set of likeliest tokens that holds this much probability",
    "min_p": "keep tokens at least this likely relative to the likeliest",
    "repetition_penalty": "divide the score of tokens in prompt and output by this",
    "presence_penalty": "subtract this from the score of tokens in the output",
    "frequency_penalty": "subtract this for each time a token is in the output",
    "logit_bias": "add this to the score of one token",
    "stop": "end the output before this text",
    "stop_token_ids": "end the output with this token",
    "ignore_eos": "do not end with the model's end-of-sequence token",
    "seed": "where all randomness comes from: with one seed the same request gives the same output",
    "logprobs": "report log-probabilities of the chosen token and of this many likeliest ones",
    "rule": "how proposals are accepted: rejection accepts more; coupled gives one text per seed, whatever the draft, "
    "K, batch or engine",
    "lenience": "below 1 more is accepted and the output is lossy: a token may become 1 / lenience times as likely as "
    "the target says, and a greedy one may be only lenience times as likely as the best",
}


def _whole(value: Any, low: int, high: float = math.inf) -> bool:
    return type(value) is int and low <= value <= high


def _real(value: Any, low: float, high: float) -> bool:
    return type(value) in (int, float) and low <= value <= high


def _require(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise RequestError(f"{name} is {value!r}, expected {expected}")
