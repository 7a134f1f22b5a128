"""The measurements of another runtime in bench, and whether it wrote our text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ..certificate.arbiter import first_difference
from .time_rounds import Setting, Waits

Texts = Sequence[Sequence[int]]


@dataclass
class Theirs:
    """One setting in all repeats; as in our measurements, the rate begins after the first tokens."""

    setting: Setting
    tokens_per_second: list[float] = field(default_factory=list)  # one a repeat
    waits: Waits = field(default_factory=Waits)
    texts: list[list[int]] = field(default_factory=list)  # of the last repeat, one a prompt

    def to_json(self, ours: Texts | None) -> dict[str, Any]:
        """`ours` are the texts that this one must write too, if there is only one right text."""
        return {
            "draft_length": self.setting.draft_length,
            "tokens_per_second": median(self.tokens_per_second),
            "tokens_per_second_each": self.tokens_per_second,
            "differs_at": None if ours is None else differs_at(ours, self.texts),
            **self.waits.to_json(),
        }


def differs_at(ours: Texts, theirs: Texts) -> list[int | None]:
    """Return where each text first differs from ours, None where it does not."""
    return [first_difference(other, one) for one, other in zip(ours, theirs, strict=True)]


def same_text(found: dict[str, Any]) -> str:
    """State what `differs_at` says of a setting, in words."""
    if found["differs_at"] is None:
        return "sampled text"
    places = [place for place in found["differs_at"] if place is not None]
    if not places:
        return "our text"
    return f"another text for {len(places)} of {len(found['differs_at'])} prompts, first at token {min(places) + 1}"
