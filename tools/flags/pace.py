"""The flags of a measurement's pace, and how much of it fits into the time that `--quick` may take."""

import argparse
from time import monotonic

from .sampling import positive

QUICK_SECONDS = 100.0  # from the reading of the flags to the last repeat, so that all of it takes less than two minutes
QUICK_PROMISE = "less than two minutes for a model of 135 million parameters on two cores"
USUAL_REPEATS = 3


def add_pace_flags(parser: argparse.ArgumentParser, quick: str) -> None:
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"take {QUICK_PROMISE}: {quick}, or less if the clock says so; what you state stays as you state it",
    )
    parser.add_argument(
        "--repeats", type=positive, metavar="N", help=f"times each setting has its turn (default {USUAL_REPEATS})"
    )


def settle_pace(arguments: argparse.Namespace) -> None:
    """Settle how often what is measured has its turn, and note when the measurement began."""
    arguments.repeats = arguments.repeats or (1 if arguments.quick else USUAL_REPEATS)
    arguments.began = monotonic()


def seconds_left(arguments: argparse.Namespace) -> float:
    return float(arguments.began) + QUICK_SECONDS - monotonic()


def times(repeats: int) -> str:
    return "once" if repeats == 1 else f"{repeats} times"


def fitting(most: int, least: int, seconds: float, left: float) -> int:
    """Return how many of `most`, which would take so many seconds, fit into what is left of them."""
    return max(least, min(most, int(most * left / seconds)))
