"""Refuses a bundle that flags name and that is not there, before anything heavy is loaded."""

import argparse
from pathlib import Path

from ...engines.bundle.manifest import read_manifest


def refuse_absent(arguments: argparse.Namespace) -> None:
    """Refuse a bundle without a sound manifest."""
    if isinstance(bundle := getattr(arguments, "bundle", None), Path):
        read_manifest(bundle)
