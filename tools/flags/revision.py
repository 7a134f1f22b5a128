"""The flag that names a revision of a model on the Hugging Face Hub."""

import argparse
from pathlib import Path

from ...engines import RequestError


def add_revision_flag(parser: argparse._ActionsContainer, whose: str) -> None:
    parser.add_argument(
        "--revision",
        metavar="R",
        help=f"the branch, tag or commit of {whose} on the Hub; that of a draft follows its name, as NAME@R",
    )


def at_revision(name: str, revision: str | None) -> str:
    """Name a checkpoint as it is at a revision."""
    if revision is None:
        return name
    if Path(name).exists():
        raise RequestError(f"--revision {revision} is for models on the Hub, but {name} is here; leave it out")
    return f"{name}@{revision}"
