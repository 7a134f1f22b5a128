"""Asks for the text of a window, again at higher temperatures where it is not good enough."""

from collections.abc import Generator
from dataclasses import dataclass, replace
from math import exp

from ...engines import Bundle
from ..acceptance.sampling_params import SamplingParams
from ..requests.metrics import Speculation
from ..requests.output import Output
from ..sources.source import Source
from .fallback import Fallback
from .tokens import WhisperTokens

SEEDS = 2**64


@dataclass(frozen=True)
class Window:
    """A text to ask a decoder for."""

    prompt: list[int]
    source: Source
    params: SamplingParams


class Hearing:
    """Hears the windows of one sound, and knows what the last one has taken."""

    def __init__(self, bundle: Bundle, tokens: WhisperTokens, params: SamplingParams, fallback: Fallback) -> None:
        self.speculation = Speculation()
        self.temperature = params.temperature  # of the last text
        self._bundle, self._tokens, self._params, self._fallback = bundle, tokens, params, fallback
        self._asked = 0

    def hear(
        self, source: Source, before: list[int], beginning: list[int]
    ) -> Generator[Window, Output, list[int] | None]:
        """Return the tokens that are heard in a window, None if nobody speaks there."""
        prompt, fallback = [*before, *beginning], self._fallback
        silence: float | None = None
        heard: tuple[int, ...] = ()
        for temperature in (self._params.temperature, *fallback.temperatures):
            self.temperature = temperature
            output: Output = yield Window(prompt, source, self._next(self._bundle.max_length - len(prompt)))
            self.speculation.add(output.speculation)
            heard = output.token_ids
            unlikely = fallback.unlikely([one.logprob for one in output.logprobs or ()])
            if unlikely and fallback.no_speech_threshold is not None:
                if silence is None:
                    silence = yield from self._silence(source, before)
                if silence > fallback.no_speech_threshold:
                    return None
            if not unlikely and not fallback.repetitive(heard, self._bundle.tokenizer.vocab_size):
                break
        return [token for token in heard if token != self._tokens.end]

    def _next(self, most: int) -> SamplingParams:
        """Return the parameters of the next text. Each has noise of its own."""
        own = self._params
        seed = None if own.seed is None else (own.seed + self._asked) % SEEDS
        self._asked += 1
        logprobs = 0 if self._fallback.weighs else own.logprobs
        return replace(own, max_new_tokens=most, temperature=self.temperature, seed=seed, logprobs=logprobs)

    def _silence(self, source: Source, before: list[int]) -> Generator[Window, Output, float]:
        """Return how likely the model holds it that nobody speaks."""
        params = SamplingParams(max_new_tokens=1, allowed_token_ids=(self._tokens.no_speech,), logprobs=0)
        output: Output = yield Window([*before, self._tokens.start], source, params)
        assert output.logprobs is not None
        return exp(output.logprobs[0].logprob)
