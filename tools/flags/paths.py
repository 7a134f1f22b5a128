"""Refuses a bundle that flags name and that is not there, before anything heavy is loaded."""

import argparse
from pathlib import Path

from ...engines import Bundle


def refuse_absent(arguments: argparse.Namespace) -> None:
    """Refuse a bundle without a sound manifest, or without the files that it lists."""
    if isinstance(bundle := getattr(arguments, "bundle", None), Path):
        Bundle.read(bundle).require_files()
