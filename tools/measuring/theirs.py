"""The measurements of another runtime in bench, and whether it wrote our text."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from ...engines import EngineError, RequestError
from ..certificate.arbiter import first_difference
from ..extras import install_command, installed
from .time_rounds import Setting, Waits

DRAFTED, LOOKUP = ("model",), "lookup"  # sources of proposals that every peer has
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


def named_folders(
    arguments: argparse.Namespace, drafter: str, flag: Mapping[str, str], what: str, drafted: Sequence[str] = DRAFTED
) -> dict[str, Path]:
    """The folders of the models that will run, by role, from the flags of a peer; `drafted` are those with a draft."""
    if drafter not in (sources := [*drafted, LOOKUP]):
        raise RequestError(
            f"--drafter is {drafter}, but --compare {arguments.compare} knows only {' and '.join(sources)}; use one"
        )
    roles = ("target", "draft") if drafter in drafted else ("target",)
    named = {role: getattr(arguments, flag[role].removeprefix("--").replace("-", "_")) for role in roles}
    if missing := [flag[role] for role, path in named.items() if path is None]:
        raise RequestError(f"--compare {arguments.compare} runs {what}; name {' and '.join(missing)}")
    return named


def require_package(arguments: argparse.Namespace, package: str, extra: str) -> None:
    if installed(package) is None:
        raise EngineError(
            f"--compare {arguments.compare} runs {package}, which is not installed; {install_command(extra)}"
        )
