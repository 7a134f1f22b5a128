"""How much a certificate tries: all of it, or what a minute is enough for."""

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Effort:
    name: str
    total_variation: float  # of the distribution: what is caught
    prompts: int  # of those that are shipped
    new_tokens: int  # of a text
    requests: int  # of the rollback
    each_length: bool  # rounds in which all rows have one drafter and one K, too
    engines: bool  # other engines, too
    work: Mapping[str, float]  # what each check takes, in seconds of two cores for the demo's bundle
    left_out: tuple[str, ...] = ()

    def catching(self, total_variation: float) -> "Effort":
        """Samples grow with its inverse square."""
        more = (self.total_variation / total_variation) ** 2
        work = {**self.work, "distribution": more * self.work["distribution"]}
        return replace(self, total_variation=total_variation, work=work)


FULL = Effort(
    name="full",
    total_variation=0.05,
    prompts=6,
    new_tokens=32,
    requests=10,
    each_length=True,
    engines=True,
    work={"checkpoint": 6, "same text": 60, "semantics": 30, "rollback": 10, "distribution": 140},
)
QUICK = Effort(
    name="quick",
    total_variation=0.2,
    prompts=3,
    new_tokens=24,
    requests=5,
    each_length=False,
    engines=False,
    work={"checkpoint": 4, "same text": 12, "semantics": 12, "rollback": 4, "distribution": 20},
    left_out=(
        "rounds in which all requests have one draft length",
        "other engines",
        "half of the prompts",
        "texts of more than 24 tokens",
    ),
)
