"""How much a certificate tries: all of it, or what a minute is enough for."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

POWER = 0.99  # with which a fault that is as large as an effort catches is seen


@dataclass(frozen=True)
class Effort:
    name: str
    total_variation: float  # of the distribution: what is caught
    prompts: int  # of those that are shipped
    new_tokens: int  # of a text
    requests: int  # of the rollback
    each_length: bool  # rounds in which all rows have one drafter and one K, too
    each_tree: bool  # the distribution of each comb and of several lines by each drafter and rule
    engines: bool  # other engines, too
    work: Mapping[str, float]  # what each check takes, measured in CPU seconds of one thread for the demo's bundle
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
    requests=14,
    each_length=True,
    each_tree=True,
    engines=True,
    work={"checkpoint": 8, "same text": 67, "semantics": 39, "rollback": 10, "distribution": 300},
)
QUICK = Effort(
    name="quick",
    total_variation=0.2,
    prompts=3,
    new_tokens=24,
    requests=12,
    each_length=False,
    each_tree=False,
    engines=False,
    work={"checkpoint": 8, "same text": 12, "semantics": 19, "rollback": 8, "distribution": 45},
    left_out=(
        "rounds in which all requests have one draft length",
        "the distribution of all combs, and of several lines, but one for each rule",
        "other engines",
        "half of the prompts",
        "texts of more than 24 tokens",
        "what parameters mean on more than one prompt",
        "caches after rollback of more than 12 requests",
    ),
)
