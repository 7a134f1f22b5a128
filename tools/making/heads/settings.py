"""Settings that make a training this one and no other: it goes on only with the same."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ....engines import RequestError
from ..training import refuse_below

OPTIONS = {"draft_vocab": 2, "heads": 1, "mlp": 1, "rank": 1}  # that not all kinds read, and the least of each


@dataclass(frozen=True)
class Settings:
    kind: str
    target: str
    prompts: str  # a digest of them
    draft_vocab: int | None = None  # None: as the kind has it, for this and the next three
    heads: int | None = None
    mlp: int | None = None  # width of a head's MLP
    rank: int | None = None  # of a LoRA
    samples: int = 2000  # rows that the target writes
    length: int = 256  # tokens of each
    batch: int = 2  # rows of a step
    rate: float = 3e-3
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        refuse_below(2, samples=self.samples)
        refuse_below(8, length=self.length)
        refuse_below(1, batch=self.batch)
        for name, least in OPTIONS.items():
            if (value := getattr(self, name)) is not None:
                refuse_below(least, **{name: value})
        if (most := self.length - 1) < (self.heads or 0):
            raise RequestError(f"--heads is {self.heads}, expected at most {most}: --length is {self.length}")
        refuse_below(0, seed=self.seed)
        if not (0 < self.rate < 1 and math.isfinite(self.rate)):
            raise RequestError(f"--rate is {self.rate}, expected a number between 0 and 1")


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def digest(prompts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(prompts).encode()).hexdigest()[:16]
