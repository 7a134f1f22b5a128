"""The draft lengths to compare: those that were asked for, or the usual ones that the engine can verify."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...engines import MAX_DRAFT_LENGTH, RequestError
from ...runtime.state.asked import AUTO, DraftLength
from ...runtime.state.shapes import read_shape
from ..console import say

if TYPE_CHECKING:
    from ...runtime import Decoder


def fixed_lengths(asked: Sequence[DraftLength] | None, usual: Sequence[int], decoder: "Decoder") -> list[int]:
    """0 and what the user asked for; or, if nothing was asked for, 0 and the usual ones that are not too long here."""
    longest = decoder.longest_draft
    if asked is None:
        lengths = sorted({0, *(k for k in usual if k <= longest)})
        if longest < max(usual):
            say(f"draft lengths {', '.join(map(str, lengths))}: the target verifies at most {longest} proposals here")
        return lengths
    lengths = sorted({0, *(k for k in asked if isinstance(k, int))})
    if lengths[-1] > longest:
        raise RequestError(
            f"--draft-lengths goes to {lengths[-1]}, but the target verifies at most {longest} proposals here; leave "
            f"out what is longer, or compile wider plans with trt-spec build --draft-length {lengths[-1]}"
        )
    return lengths


def draft_lengths(text: str) -> tuple[DraftLength, ...]:
    parts = text.split(",")
    shapes = [shape for part in parts if (shape := read_shape(part))]
    fixed = [part for part in parts if part != AUTO and not read_shape(part)]
    lengths = fixed_draft_lengths(",".join(fixed)) if fixed else ()
    return (*lengths, *shapes, AUTO) if AUTO in parts else (*lengths, *shapes)


def fixed_draft_lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = (-1,)
    if not all(0 <= length <= MAX_DRAFT_LENGTH for length in lengths):
        raise argparse.ArgumentTypeError(f"{text!r}, expected whole numbers from 0 to {MAX_DRAFT_LENGTH} like 0,2,4")
    return lengths
