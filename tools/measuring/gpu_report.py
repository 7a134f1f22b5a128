"""Measure on a GPU, in one run of so many minutes: speed by size, parity with transformers, and whether TensorRT runs.

    python -m trt_spec.tools.measuring.gpu_report --work DIR [--minutes 4] [--device cuda] [--shapes 1B 3B] [--json OUT]

The most telling parts come first. A row is printed when it is known, a part that would not fit is left out and named.
Speed is measured on pairs grown from the demo pair (growing.py), so texts and acceptance are real: tokens per second
by K or tree, batch, temperature and mode (eager, captured, compiled), and those of transformers. Each shape is grown
and exported once, into DIR. The output ends with a table beside the figures of another GPU, which are kept in this
repository, and on the last line with one JSON object.
"""

import argparse
import gc
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...engines import RequestError
from ..console import say, table_of
from ..flags.sampling import add_number
from ..making.training import refuse_device
from ..program import program
from .budget import Done, Part, Row, run_parts
from .gpu_figures import figures
from .gpu_parts import (
    DTYPES,
    SHAPES,
    Speed,
    bandwidth,
    compiled_starts,
    coupled_ties,
    grown_pair,
    parity,
    speeds,
    transformers_speeds,
    try_rtx,
)

MINUTES = 4.0
END_SECONDS = 2.0  # of the minutes are for the end
USUAL_SHAPES = ("1B", "3B")
FIRST = (Speed("captured", 1, 0.0, "0,2,4", 10),)
FURTHER = (
    Speed("captured", 8, 0.0, "0,2,4", 10),
    Speed("captured", 1, 1.0, "0,2,4", 10),
    Speed("eager", 1, 0.0, "0,4", 10),
    Speed("captured", 8, 1.0, "0,2,4", 10),
    Speed("compiled", 1, 0.0, "0,4", 30),
    Speed("captured", 1, 0.0, "5+3,6/8,6/24", 15),
    Speed("captured", 16, 0.0, "0,2,4", 15),
)
GROW_SECONDS = {"0.1B": 5.0, "1B": 25.0, "3B": 60.0, "8B": 150.0}
OTHER = ("pair", "mode", "batch", "temperature", "draft_length")  # what tells one speed from another
COMPARED = {name: (name, "") for name in OTHER} | {
    "tokens/s": ("tokens_per_second", ".0f"),
    "there": ("there", ".0f"),
    "here : there": ("ratio", ".2f"),
    "round ms": ("round_ms", ".3f"),
    "predicted": ("predicted_ms", ".3f"),
}


def parts_of(work: Path, device: str, pairs: Sequence[str], new_tokens: int) -> Iterator[Part]:
    """Yield all parts, the most telling first."""
    dtype = "float32" if device == "cpu" else "bfloat16"
    yield Part("bandwidth", 2, partial(bandwidth, device))
    for place, pair in enumerate(pairs):
        folder = work / f"grown-{pair}"

        def speed(one: Speed, pair: str = pair, folder: Path = folder) -> Part:
            rows = partial(speeds, pair, folder / "bundle", device, one, new_tokens)
            return Part(f"speed {pair}, {one.mode}, batch {one.batch}, T {one.temperature:g}", one.seconds, rows)

        there = (folder / "bundle" / "manifest.json").exists()
        yield Part(f"grown {pair}", 0 if there else GROW_SECONDS[pair], partial(_grow, work, pair, dtype))
        yield from map(speed, FIRST)
        theirs = partial(transformers_speeds, pair, folder, dtype, device, new_tokens)
        yield Part(f"speed {pair}, transformers", 15, theirs)
        if not place:
            yield Part("parity torch float32", 10, partial(parity, work, device, "torch", "float32", new_tokens))
        if device != "cpu":  # which takes minutes
            yield Part(f"compiling {pair}", 30, partial(compiled_starts, pair, folder / "bundle", device))
        yield from map(speed, FURTHER)
    yield Part("coupled", 10, partial(coupled_ties, work, device, "torch", new_tokens))
    for engine in ("torch", "onnxruntime"):
        for one in DTYPES:
            if (engine, one) == ("torch", "float32") or (
                engine == "onnxruntime" and device == "cpu" != one != "float32"
            ):
                continue  # the first has been measured, and for the others there are no kernels
            yield Part(f"parity {engine} {one}", 10, partial(parity, work, device, engine, one, new_tokens))
    if device != "cpu":
        yield Part("tensorrt for rtx", 60, partial(try_rtx, work, device))


def _grow(work: Path, pair: str, dtype: str) -> Iterator[Row]:
    yield {"folder": grown_pair(work, pair, dtype)}


def report(
    work: Path, device: str, pairs: Sequence[str], new_tokens: int, minutes: float, out: Path | None
) -> dict[str, Any]:
    """Run what fits, and keep what was found after each part."""
    refuse_device(device)
    work.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name(device) if device != "cpu" else "cpu"
    rows: dict[str, list[Row]] = {}
    found: dict[str, Any] = {"device": name, "minutes": minutes, "rows": rows, "failed": {}, "left_out": {}}

    def show(part: Part, row: Row) -> None:
        rows.setdefault(part.name.split()[0], []).append(row)
        print(f"{part.name}: {_in_words(row)}", flush=True)

    def keep(part: Part, done: Done) -> None:
        for key, why in (("failed", done.failed), ("left_out", done.left_out)):
            if why is not None:
                found[key][part.name] = why
        if out is not None:
            out.write_text(json.dumps(found) + "\n", encoding="utf-8")

    seconds = max(0.0, 60 * minutes - END_SECONDS)
    for part, done in run_parts(parts_of(work, device, pairs, new_tokens), seconds, show, _release):
        say(f"{part.name}: {done.failed or done.left_out or 'done'}")
        keep(part, done)
    return found


def _in_words(row: Row) -> str:
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row.items()
        if value is not None
    )


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def compared(speed: Sequence[Row]) -> list[Row]:
    """Put each speed beside the one that was measured on the GPU of the kept figures."""
    there = {tuple(one[name] for name in OTHER): one["tokens_per_second"] for one in figures()["speeds"]}
    rows = []
    for one in speed:
        other = there.get(tuple(one[name] for name in OTHER))
        ratio = None if other is None else one["tokens_per_second"] / other
        rows.append(one | {"there": other, "ratio": ratio})
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="keeps checkpoints and bundles")
    parser.add_argument("--device", default="cuda", metavar="D", help="default cuda; cpu tries the report itself out")
    parser.add_argument(
        "--shapes",
        nargs="*",
        choices=list(SHAPES),
        default=list(USUAL_SHAPES),
        help=f"sizes of the pairs, in their order (default: {' '.join(USUAL_SHAPES)})",
    )
    parser.add_argument(
        "--minutes", type=_minutes, default=MINUTES, metavar="M", help=f"that it may take (default {MINUTES:g})"
    )
    add_number(parser, "--new-tokens", 96, "of each output")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file as well")


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes <= 1440:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}, expected a number of minutes up to 1440")
    return minutes


def run(arguments: argparse.Namespace) -> int:
    try:
        found = report(
            arguments.work,
            arguments.device,
            arguments.shapes,
            arguments.new_tokens,
            arguments.minutes,
            arguments.json,
        )
    except OSError as error:
        raise RequestError(f"the report cannot be kept ({error}); name another --work or --json") from error
    if speed := found["rows"].get("speed"):
        print(f"\nhere: {found['device']}; there: {figures()['measured_on']}, {figures()['of']}")
        print(table_of(compared(speed), COMPARED, left=2))
    for title, parts in (("failed", found["failed"]), ("left out", found["left_out"])):
        for part, reason in parts.items():
            print(f"{title}: {part}: {reason}")
    print(json.dumps(found))
    return 1 if found["failed"] else 0


main = program("gpu_report", __doc__, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
