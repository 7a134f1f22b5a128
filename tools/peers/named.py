"""What the flags of bench name for a peer: its models, and its package."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...engines import EngineError, RequestError
from ..extras import install_command, installed

DRAFTED, LOOKUP = ("model",), "lookup"  # sources of proposals that every peer has


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
