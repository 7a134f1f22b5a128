"""Flags of what serves many clients: how many requests are decoded together, and how much memory caches take."""

import argparse
import re

from .groups import LIMITS, group
from .sampling import add_number, batch_size

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def add_limit_flags(parser: argparse.ArgumentParser) -> None:
    limits = group(parser, LIMITS)
    add_number(limits, "--max-batch", 8, "requests to decode together", batch_size)
    limits.add_argument(
        "--cache-memory", type=_bytes, metavar="SIZE", help="the most memory for all caches, for instance 2GiB"
    )
    limits.add_argument(
        "--prefix-memory",
        type=_bytes,
        default=2**28,
        metavar="SIZE",
        help="the most memory beside it for what requests leave to others that begin alike (default 256MiB; 0: none)",
    )


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d{1,15})\s*([KMG]i?B|)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text[:20]!r}, expected a size like 500MB or 2GiB")
    return int(found[1]) * UNITS[found[2]]


def seconds(text: str) -> float:
    if not re.fullmatch(r"\d{1,6}(\.\d{1,6})?", text):
        raise argparse.ArgumentTypeError(f"{text[:20]!r}, expected a number of seconds")
    return float(text)
