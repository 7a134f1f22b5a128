"""The parts of a request that a drafter reads."""

from typing import Protocol

from ..acceptance.sampling_params import SamplingParams


class Asking(Protocol):
    prompt: tuple[int, ...]
    prediction: tuple[int, ...]  # what its owner expects the output to be like
    token_ids: list[int]
    params: SamplingParams

    @property
    def longest(self) -> int: ...
