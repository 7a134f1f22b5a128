"""Measure draft lengths against each other and against what theory predicts from the parts of a round.

Tokens per second count decoding only, not the reading of prompts. Round overhead is the time of a round over the time
of the bare engine runs in it: 1.00 is perfect. The last line of output is one JSON object.
"""

import argparse
import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from ..engines import MAX_DRAFT_LENGTH
from ..runtime import Decoder, SamplingParams
from ..runtime.drafters import SOURCES
from .bandwidth import read_bandwidth
from .engine_flags import add_engine_flags, open_decoder
from .layout import in_bytes, table
from .measure import Measured, Setting, measure
from .prompts import PYTHON_PROMPTS, read_prompts
from .report import lossy, total
from .sampling_flags import add_sampling_flags, positive, sampling_params
from .theory import tokens_per_round
from .whole_file import whole_file

DRAFT_LENGTHS = (0, 1, 2, 4, 6, 8)
SAMPLING = ("max_new_tokens", "temperature", "draft_temperature", "top_k", "top_p", "min_p", "seed", "rule", "lenience")
HEADER = ("K", "tokens/s", "acceptance", "tokens/round", "overhead", "speed-up", "predicted")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bundle", required=True, metavar="B", type=Path, help="made by export-models")
    parser.add_argument("--prompts", metavar="F", type=Path, help='a prompt a line; .jsonl: {"prompt": "text"} a line')
    parser.add_argument(
        "--draft-lengths",
        type=draft_lengths,
        default=DRAFT_LENGTHS,
        metavar="K,K,…",
        help=f"0 is always among them (default {','.join(map(str, DRAFT_LENGTHS))})",
    )
    parser.add_argument("--drafter", choices=SOURCES, help="default: the draft model if there is one")
    parser.add_argument("--repeats", type=positive, default=3, metavar="N", help="of the whole round robin (default 3)")
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="prompts decoded together (default 1)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the JSON object to this file, too")
    add_engine_flags(parser)
    add_sampling_flags(parser, only=SAMPLING)


def run(arguments: argparse.Namespace) -> int:
    params = sampling_params(arguments, ignore_eos=True)  # so that all settings write equally much
    params = replace(params, seed=params.seed or 0)
    prompts = list(PYTHON_PROMPTS) if arguments.prompts is None else read_prompts(arguments.prompts)
    whole_batches = -(-len(prompts) // arguments.batch) * arguments.batch  # others would not compare
    prompts = [prompts[i % len(prompts)] for i in range(whole_batches)]
    with ExitStack() as stack:
        out = stack.enter_context(whole_file(arguments.json)) if arguments.json else None
        decoder = stack.enter_context(open_decoder(arguments, max_batch=arguments.batch))
        drafter = arguments.drafter or ("lookup" if decoder.draft is None else "model")
        settings = [Setting(k, drafter if k else "none") for k in sorted({0, *arguments.draft_lengths})]
        bandwidth = read_bandwidth(arguments.device)
        measured = _measure_all(decoder, settings, prompts, params, arguments.repeats)
        bandwidth = max(bandwidth, read_bandwidth(arguments.device))
        result = _result(decoder, measured, bandwidth, params, prompts, arguments)
        if out is not None:
            print(json.dumps(result), file=out)
    print(_report(result))
    print(json.dumps(result))
    return 0


def _measure_all(
    decoder: Decoder, settings: list[Setting], prompts: list[str], params: SamplingParams, repeats: int
) -> list[Measured]:
    assert params.seed is not None
    each = [replace(params, seed=params.seed + i) for i in range(len(prompts))]
    for setting in settings:
        _progress(f"warming up K = {setting.draft_length}")
        measure(decoder, prompts[: decoder.max_batch], each[: decoder.max_batch], Measured(setting))
    measured = [Measured(setting) for setting in settings]
    for repeat in range(repeats):
        for one in measured:
            _progress(f"repeat {repeat + 1} of {repeats}, K = {one.setting.draft_length}")
            measure(decoder, prompts, each, one)
    return measured


def _result(
    decoder: Decoder,
    measured: list[Measured],
    bandwidth: float,
    params: SamplingParams,
    prompts: list[str],
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    bundle, plain = decoder.bundle, measured[0]
    # A tied embedding is stored twice and read once; of quantised weights the embedding is a small part.
    target = bundle.target
    size = 4 if target.contract.dtype == "float32" else 2
    weight_bytes = size * target.parameters if target.weights == "none" else bundle.weight_bytes("target")
    roof_ms = 1e3 * weight_bytes / bandwidth
    return {
        "bundle": str(arguments.bundle),
        "target": bundle.target.name,
        "draft": None if bundle.draft is None else bundle.draft.name,
        "engine": arguments.engine,
        "device": arguments.device,
        "drafter": measured[-1].setting.drafter,
        "batch": arguments.batch,
        "prompts": len(prompts),
        "repeats": arguments.repeats,
        "lossless": not params.lenient,
        "sampling": {name: getattr(params, name) for name in SAMPLING},
        "roof": {
            "weight_bytes": weight_bytes,
            "bandwidth_bytes_per_second": bandwidth,
            "roof_ms": roof_ms,
            "bare_ms": plain.verify_ms,
            "bare_over_roof": plain.verify_ms / roof_ms,
        },
        "settings": [setting_json(one, plain) for one in measured],
    }


def setting_json(measured: Measured, plain: Measured) -> dict[str, Any]:
    """Times, and the speed-up theory predicts from the measured c, v and α alone."""
    k, t = measured.setting.draft_length, plain.verify_ms
    rate = median(measured.tokens_per_second)
    counts = total(measured.speculation)
    alpha = counts.acceptance
    c, v = measured.draft_ms / k / t if k else 0.0, measured.verify_ms / t
    proposing = sum(counts.histogram) / counts.rounds  # some drafters propose only where they find a match
    each = (tokens_per_round(alpha or 0.0, one.proposed) * rounds for one, rounds in counts.outcomes.items())
    expected = sum(each) / counts.rounds
    return {
        "draft_length": k,
        "tokens_per_second": rate,
        "acceptance": alpha,
        "tokens_per_round": counts.tokens_per_round,
        "round_overhead": measured.round_overhead,
        "speed_up": rate / median(plain.tokens_per_second),
        "predicted": expected / (c * k + v),
        "c": c,
        "v": v,
        "proposing": proposing,
        "round_ms": median(measured.round_ms),
        "draft_ms": measured.draft_ms,
        "verify_ms": measured.verify_ms,
        "speculation": counts.to_json(),
    }


def _report(result: dict[str, Any]) -> str:
    rows = [
        (
            str(one["draft_length"]),
            f"{one['tokens_per_second']:.1f}",
            "-" if one["acceptance"] is None else f"{one['acceptance']:.3f}",
            f"{one['tokens_per_round']:.2f}",
            f"{one['round_overhead']:.3f}",
            f"{one['speed_up']:.2f}",
            f"{one['predicted']:.2f}",
        )
        for one in result["settings"]
    ]
    roof = result["roof"]
    note = "" if result["lossless"] else f"{lossy(result['sampling']['lenience'])}\n"
    return (
        f"{table([HEADER, *rows], left=0)}\n{note}"
        f"bare target, one token: {roof['bare_ms']:.2f} ms, {roof['bare_over_roof']:.2f} × the roof of "
        f"{in_bytes(roof['weight_bytes'])} of weights at {in_bytes(roof['bandwidth_bytes_per_second'])}/s"
    )


def draft_lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = (-1,)
    if not all(0 <= length <= MAX_DRAFT_LENGTH for length in lengths):
        raise argparse.ArgumentTypeError(f"{text!r}, expected whole numbers from 0 to {MAX_DRAFT_LENGTH} like 0,2,4")
    return lengths


def _progress(stage: str) -> None:
    print(stage, file=sys.stderr, flush=True)
