"""What makes a training this one and no other: it goes on only with the same."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ....engines import RequestError
from ..training import refuse_below


@dataclass(frozen=True)
class Settings:
    kind: str
    target: str
    prompts: str  # a digest of them
    draft_vocab: int = 2048
    mlp: int | None = None  # width of the head's MLP; None: twice the hidden size
    samples: int = 2000  # rows that the target writes
    length: int = 256  # tokens of each
    batch: int = 2  # rows of a step
    rate: float = 3e-3
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        refuse_below(2, samples=self.samples, draft_vocab=self.draft_vocab)
        refuse_below(8, length=self.length)
        refuse_below(1, batch=self.batch)
        refuse_below(0, seed=self.seed)
        if not (0 < self.rate < 1 and math.isfinite(self.rate)):
            raise RequestError(f"--rate is {self.rate}, expected a number between 0 and 1")


def digest(prompts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(prompts).encode()).hexdigest()[:16]
