"""Show which of transformers' model families export-models can export, and why it refuses the others."""

import argparse
import json

from ...export.families.table import REFUSED, WORKS
from ...export.families.text_models import READS_MORE
from ..console import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object: each model type with the reason against it, or null"
    )


def run(arguments: argparse.Namespace) -> int:
    reasons: dict[str, str | None] = dict.fromkeys((*WORKS, *READS_MORE)) | REFUSED
    if arguments.json:
        print(json.dumps(reasons))
        return 0
    rows = [(kind, _said(kind, reason)) for kind, reason in sorted(reasons.items())]
    print(table(rows, left=2, heading=False))
    print(
        f"\n{len(WORKS)} work, and the text models of {len(READS_MORE)} more, as seen on random checkpoints of each "
        "family; every export checks itself again."
    )
    return 0


def _said(kind: str, reason: str | None) -> str:
    if reason is not None:
        return f"refused: {reason}"
    return "works" if kind in WORKS else "works: its text model"
