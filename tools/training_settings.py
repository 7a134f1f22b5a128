"""The settings of a training: the kinds that can be trained, what each of them reads, and values that make no sense."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..engines import RequestError

DRAFT = "draft"
KINDS: dict[str, tuple[str, ...]] = {  # with those settings that not all kinds read
    DRAFT: ("draft", "cut", "layers", "hidden", "reverse", "after"),
    "eagle3": ("draft_vocab", "mlp"),
    "mtp": ("mlp",),
    "medusa": ("heads",),
    "blockwise": ("heads", "mlp"),
    "pass": ("heads", "rank"),
}
DRAFT_VOCAB, HEADS = 2048, 4  # usual ones


@dataclass(frozen=True)
class DraftSettings:
    """How a draft is taught."""

    draft: str | None = None  # the checkpoint to start from
    cut: int | None = None  # layers of the target to start from
    layers: int = 2  # of a new one, as is the next
    hidden: int = 128
    samples: int = 400  # continuations that the target writes
    length: int = 128  # tokens of each
    batch: int = 16  # windows of a step
    rate: float = 1e-3
    reverse: bool = False
    after: Sequence[str] = ()
    device: str = "cpu"
    seed: int = 0
    usual_steps: ClassVar[int] = 2000

    def __post_init__(self) -> None:
        refuse_below(2, samples=self.samples, length=self.length)
        refuse_below(1, layers=self.layers, batch=self.batch)
        if self.cut is not None and self.draft is not None:
            raise RequestError("--draft and --cut both say what to start from; leave one out")
        if self.hidden < 2 or self.hidden % min(64, self.hidden) or self.hidden % 2:
            raise RequestError(f"--hidden is {self.hidden}, expected a multiple of 64, or an even number below")
        refuse_rate(self.rate)
        if self.after and self.reverse:
            raise RequestError("--reverse is for a draft alone; leave it out, or --after")


@dataclass(frozen=True)
class HeadSettings:
    """How a head is taught. They make a training this one and no other: it goes on only with the same."""

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
    usual_steps: ClassVar[int] = 4000

    def __post_init__(self) -> None:
        refuse_below(2, samples=self.samples)
        refuse_below(8, length=self.length)
        refuse_below(1, batch=self.batch)
        for name, least in LEAST.items():
            if (value := getattr(self, name)) is not None:
                refuse_below(least, **{name: value})
        if (most := self.length - 1) < (self.heads or 0):
            raise RequestError(f"--heads is {self.heads}, expected at most {most}: --length is {self.length}")
        refuse_below(0, seed=self.seed)
        refuse_rate(self.rate)


LEAST = {"draft_vocab": 2, "heads": 1, "mlp": 1, "rank": 1}  # of what not all heads read


def settings_of(kind: str, target: str, prompts: Sequence[str], **given: Any) -> DraftSettings | HeadSettings:
    """Return the settings of a training, or refuse those that make no sense."""
    if kind not in KINDS:
        raise RequestError(f"the kind is {kind!r}, expected one of {', '.join(KINDS)}")
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if (readers := readers_of(name)) and kind not in readers:
            raise RequestError(f"{flag(name)} is for {', '.join(readers)} and says nothing to {kind}; leave it out")
    return DraftSettings(**given) if kind == DRAFT else HeadSettings(kind, target, digest(prompts), **given)


def readers_of(name: str) -> list[str]:
    """Return the kinds that read this setting, or none if all do."""
    return [kind for kind, read in KINDS.items() if name in read]


def refuse_below(least: int, **settings: int) -> None:
    for name, value in settings.items():
        if value < least:
            raise RequestError(f"{flag(name)} is {value}, expected at least {least}")


def refuse_rate(rate: float) -> None:
    if not 0 < rate < 1:
        raise RequestError(f"--rate is {rate}, expected a number between 0 and 1")


def refuse_pace(steps: int, minutes: float) -> None:
    refuse_below(1, steps=steps)
    if not minutes > 0:
        raise RequestError(f"--minutes is {minutes:g}, expected more than 0")


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def digest(prompts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(prompts).encode()).hexdigest()[:16]
