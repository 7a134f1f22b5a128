"""Measure what a round costs on this machine by draft length and batch, and keep the table in the bundle.

From then on auto is the default draft length: each round chooses the most rewarding length, by this table and by how
many of the request's own proposals were accepted so far. The last line of the output is one JSON object.
"""

import argparse
import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from ...engines import Bundle
from ...runtime import CombLength, Decoder, SamplingParams, Speculation
from ...runtime.drafters import DRAFTERS
from ...runtime.engine_choice import AUTO_ENGINE, save_choice
from ...runtime.lengths.costs import Costs, machine_name, model_identities
from ...runtime.lengths.shapes import DraftShape, TreeLength
from ...runtime.requests.intake import Prompt
from ...runtime.sampling.noise import MOST_SIBLINGS
from ..console import progress, say, table
from ..flags.draft_lengths import fixed_draft_lengths, fixed_lengths
from ..flags.engine import add_engine_flags, engine_name, open_decoder
from ..flags.prompt import add_prompts_flag
from ..flags.sampling import LARGEST_BATCH, add_sampling_flags, batch_size, positive, sampling_params
from ..measuring.bench_result import setting_json
from ..measuring.fastest_engine import fastest_engines
from ..measuring.shipped_prompts import bench_prompts
from ..measuring.theory import tokens_per_round
from ..measuring.time_reading import reading_ms
from ..measuring.time_rounds import Measured, Setting, measure, refuse_unfit, total
from ..whole_file import whole_file

DRAFT_LENGTHS = (0, 1, 2, 4, 8, 16)
BATCHES = (1, 2, 4, 8)
NEW_TOKENS = 32
SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "rule")
BUSY = 0.3  # the spread of rounds beyond which something else has run beside them
MOST_OF_COPY = 8  # proposals with which a drafter that costs as much as another is measured
SIBLINGS = (1, 2, 4, 8)  # measured beside one line
LINE_OF_COMB = 4  # or the longest measured line below it
TREES = tuple(TreeLength(length, nodes) for length, nodes in ((4, 8), (4, 16), (8, 16), (8, 32)))
HEADER = ("drafter", "batch", "K", "round ms", "host ms", "acceptance", "tokens/round", "speed-up", "predicted")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="the folder that export-models wrote")
    add_prompts_flag(parser)
    parser.add_argument(
        "--draft-lengths",
        type=fixed_draft_lengths,
        metavar="K,K,…",
        help="tokens to propose in a round; 0 is always measured as well (default: those of "
        f"{','.join(map(str, DRAFT_LENGTHS))} that the engine can verify)",
    )
    parser.add_argument(
        "--batches",
        type=_batches,
        default=BATCHES,
        metavar="N,N,…",
        help=f"numbers of requests to decode together (default {','.join(map(str, BATCHES))}); --engine auto finds the "
        "engines that are fastest for the smallest and the largest of them",
    )
    parser.add_argument(
        "--repeats", type=positive, default=3, metavar="N", help="times each setting has its turn (default 3)"
    )
    parser.add_argument(
        "--all-drafts", action="store_true", help="measure every draft of the bundle as a drafter, not the first alone"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the JSON object to this file as well")
    add_engine_flags(parser)
    add_sampling_flags(parser, only=SAMPLING, max_new_tokens=NEW_TOKENS)


def run(arguments: argparse.Namespace) -> int:
    params = sampling_params(arguments, ignore_eos=True)
    params = replace(params, seed=params.seed or 0)
    with ExitStack() as stack:
        out = stack.enter_context(whole_file(arguments.json)) if arguments.json else None
        if engine_name(arguments) == AUTO_ENGINE:
            _choose_engine(Bundle.open(arguments.bundle), arguments.device, arguments.batches)
        decoder = stack.enter_context(open_decoder(arguments, max_batch=max(arguments.batches)))
        lengths = fixed_lengths(arguments.draft_lengths, DRAFT_LENGTHS, decoder)
        prompts = bench_prompts(arguments.prompts, decoder.vocab_size)
        refuse_unfit(decoder, prompts, [params] * len(prompts))
        measured, shapes = _measure_all(decoder, lengths, arguments, prompts, params)
        costs = _costs(decoder, measured, shapes, arguments)
        result = _result(costs, measured, shapes)
        result["file"] = str(costs.save(decoder.bundle))
        if out is not None:
            print(json.dumps(result), file=out)
    print(_report(result))
    print(json.dumps(result))
    return 0


def _choose_engine(bundle: Bundle, device: str, batches: tuple[int, ...]) -> None:
    """Measure which engine runs each model fastest, and keep that: engine auto is this from then on."""
    engine, times = fastest_engines(bundle, device, batches, say)
    rows = [("model", "engine", "ms a step"), *((m, e, f"{ms:.2f}") for m, by in times.items() for e, ms in by.items())]
    say(table(rows, left=2))
    say(f"engine {engine}, kept in {save_choice(bundle, device, engine)}")


Grid = dict[tuple[str, int, int], Measured]  # by drafter, batch and draft length; "none" at 0
Shapes = dict[tuple[str, int, DraftShape], Measured]  # combs, all of one line, and trees, by drafter and batch


def _measure_all(
    decoder: Decoder, lengths: list[int], arguments: argparse.Namespace, prompts: list[Prompt], params: SamplingParams
) -> tuple[Grid, Shapes]:
    assert params.seed is not None
    drafters = [
        name
        for name in decoder.drafters
        if name != "random" and (arguments.all_drafts or not DRAFTERS[name].which_draft)
    ]
    settings = [Setting(0, "none")]
    for drafter in drafters:
        alone = [k for k in lengths if 0 < k <= MOST_OF_COPY][-1:]  # of such a drafter only the acceptance is measured
        settings += [Setting(k, drafter) for k in (alone if DRAFTERS[drafter].costs_as else lengths) if k]
    grid: Grid = {
        (setting.drafter, batch, setting.draft_length): Measured(setting)
        for batch in arguments.batches
        for setting in settings
    }
    shapes: Shapes = {
        (drafter, batch, shape): Measured(Setting(shape.length, drafter, shape=shape))
        for batch in arguments.batches
        for drafter in filter(_has_shapes, drafters)
        for shape in _shapes(decoder, drafters, lengths, params)
    }
    turns = [(batch, one) for measured in (grid, shapes) for (_, batch, _), one in measured.items()]
    with progress("tune", total=(1 + arguments.repeats) * len(turns)) as show:
        for repeat in range(1 + arguments.repeats):
            stage = f"repeat {repeat} of {arguments.repeats}" if repeat else "warming up"
            for batch, one in turns:
                show(f"{stage}, batch {batch}, {one.setting.drafter}, {one.setting}")
                chosen = [prompts[(repeat * batch + i) % len(prompts)] for i in range(batch)]
                each = [replace(params, seed=params.seed + repeat * batch + i) for i in range(batch)]
                measure(decoder, chosen, each, one if repeat else Measured(one.setting))
            if not repeat:
                decoder.settle()
    return grid, shapes


def _has_shapes(drafter: str) -> bool:
    return DRAFTERS[drafter].needs_model and DRAFTERS[drafter].samples


def _shapes(decoder: Decoder, drafters: list[str], lengths: list[int], params: SamplingParams) -> list[DraftShape]:
    """Return the combs and trees that all of these can make here, beside lines that are measured as well."""
    line, most = max(k for k in lengths if k <= LINE_OF_COMB), decoder.largest_comb
    shapes: list[DraftShape] = [CombLength(line, count) for count in SIBLINGS if count <= MOST_SIBLINGS * line]
    able = all(name in decoder.growing for name in drafters if _has_shapes(name))  # of one table all have the same
    shapes += [tree for tree in TREES if tree.length in lengths and able]
    by_chance = params.test != "coupled"
    return [one for one in shapes if one.beyond <= most - (decoder.longest_draft if by_chance else one.length)]


def _costs(decoder: Decoder, grid: Grid, shapes: Shapes, arguments: argparse.Namespace) -> Costs:
    lengths = tuple(sorted({k for _, _, k in grid}))
    drafters = [name for name in dict.fromkeys(drafter for drafter, _, _ in grid) if name != "none"]
    counts = {drafter: _counted(grid, drafter) for drafter in drafters}
    return Costs(
        engine=decoder.engine,
        device=arguments.device,
        machine=machine_name(arguments.device),
        models=model_identities(decoder.bundle),
        batches=arguments.batches,
        draft_lengths=lengths,
        round_ms={
            drafter: tuple(
                tuple(median(grid[_measured_as(drafter) if k else "none", batch, k].round_ms) for k in lengths)
                for batch in arguments.batches
            )
            for drafter in drafters
        },
        acceptance={name: counted.acceptance or 0.0 for name, counted in counts.items()},
        proposing={
            name: 1.0 if DRAFTERS[name].costs_as else sum(counted.histogram) / counted.rounds
            for name, counted in counts.items()
        },
        reading_ms={
            name: reading_ms(decoder, decoder.drafts[DRAFTERS[name].which_draft])
            for name in drafters
            if DRAFTERS[name].needs_model
        },
        **_costs_beside(grid, shapes, arguments.batches),
    )


def _costs_beside(grid: Grid, shapes: Shapes, batches: tuple[int, ...]) -> dict[str, Any]:
    """What siblings and branches add to the round of their line, and how many of them stand where it falls."""
    names = list(dict.fromkeys(drafter for drafter, _, _ in shapes))
    each = list(dict.fromkeys(shape for _, _, shape in shapes))

    def added_ms(drafter: str, batch: int, shape: DraftShape) -> float:
        line = grid[drafter, batch, shape.length]
        return max(0.0, median(shapes[drafter, batch, shape].round_ms) - median(line.round_ms))

    def stood(drafter: str, shape: DraftShape) -> float:
        seen = total(one for batch in batches for one in shapes[drafter, batch, shape].speculation)
        return seen.stood_beside or 0.0

    return {
        "beside": tuple(shape.siblings if isinstance(shape, CombLength) else str(shape) for shape in each),
        "beside_ms": {
            name: tuple(tuple(added_ms(name, batch, shape) for shape in each) for batch in batches) for name in names
        },
        "beside_tokens": {name: tuple(stood(name, shape) for shape in each) for name in names},
    }


def _measured_as(drafter: str) -> str:
    return DRAFTERS[drafter].costs_as or drafter


def _counted(grid: Grid, drafter: str) -> Speculation:
    """What this drafter did over all batches and draft lengths."""
    return total(one for (name, _, _), many in grid.items() if name == drafter for one in many.speculation)


def _result(costs: Costs, grid: Grid, shapes: Shapes) -> dict[str, Any]:
    settings = []
    for (drafter, batch, _), one in (*grid.items(), *shapes.items()):
        found = setting_json(one, grid["none", batch, 0])
        host_ms = found["round_ms"] - found["draft_ms"] - found["verify_ms"]
        settings.append(
            {"drafter": drafter, "batch": batch, "shape": str(one.setting.length), "host_ms": host_ms} | found
        )
    return {
        "engine": costs.engine,
        "device": costs.device,
        "machine": costs.machine,
        "spread": _spread([*grid.values(), *shapes.values()]),
        "settings": settings,
        "drafters": [_advice(costs, drafter, _counted(grid, drafter)) for drafter in costs.acceptance],
    }


def _spread(measured: list[Measured]) -> float:
    """How far the middle half of a setting's rounds lie apart, over their median; of all settings the median."""
    found = []
    for one in measured:
        if len(one.round_ms) > 1:
            low, middle, high = quantiles(one.round_ms, n=4)
            found.append((high - low) / middle)
    return median(found) if found else 0.0


def _advice(costs: Costs, drafter: str, counted: Speculation) -> dict[str, Any]:
    """The best draft length for each batch, by the measured costs and the acceptance over all prompts."""
    by_batch = []
    for batch in costs.batches:
        times = costs.round_times(drafter, batch)
        chance, alpha = costs.proposing[drafter], costs.acceptance[drafter]
        expected = [1 + chance * (tokens_per_round(alpha, k) - 1) for k in range(costs.longest + 1)]
        speed_ups = [tokens * times[0] / ms for tokens, ms in zip(expected, times, strict=True)]
        best = max(range(len(times)), key=speed_ups.__getitem__)
        by_batch.append(
            {
                "batch": batch,
                "best_draft_length": best,
                "speed_up": speed_ups[best],
                "oracle_speed_up": _oracle(costs.acceptance[drafter], costs.proposing[drafter], times),
            }
        )
    return {
        "drafter": drafter,
        "acceptance": costs.acceptance[drafter],
        "acceptance_by_position": counted.acceptance_by_position,
        "reading_ms": costs.reading_ms.get(drafter),
        "stood_beside": dict(zip(costs.beside, costs.beside_tokens.get(drafter, ()), strict=False)),
        "stops_paying_at": next((row["batch"] for row in by_batch if not row["best_draft_length"]), None),
        "batches": by_batch,
    }


def _oracle(alpha: float, proposing: float, times: list[float]) -> float:
    """The speed-up if each round knew how many proposals would be accepted, and made the best number of them."""
    longest = len(times) - 1
    shares = [proposing * alpha**n * (1 - alpha if n < longest else 1) for n in range(longest + 1)]
    shares[0] += 1 - proposing
    lengths = [max(range(n + 1), key=lambda k: (k + 1) / times[k]) for n in range(longest + 1)]
    tokens = sum(share * (k + 1) for share, k in zip(shares, lengths, strict=True))
    return tokens * times[0] / sum(share * times[k] for share, k in zip(shares, lengths, strict=True))


def _report(result: dict[str, Any]) -> str:
    rows = [
        (
            one["drafter"],
            str(one["batch"]),
            one["shape"],
            f"{one['round_ms']:.2f}",
            f"{one['host_ms']:.2f}",
            "-" if one["acceptance"] is None else f"{one['acceptance']:.3f}",
            f"{one['tokens_per_round']:.2f}",
            f"{one['speed_up']:.2f}",
            "-" if one["predicted"] is None else f"{one['predicted']:.2f}",
        )
        for one in result["settings"]
    ]
    lines = [table([HEADER, *rows])]
    for drafter in result["drafters"]:
        by_position = ["-" if share is None else f"{share:.0%}" for share in drafter["acceptance_by_position"]]
        lines.append(
            f"{drafter['drafter']}: {drafter['acceptance']:.0%} of examined proposals accepted, at position 1, 2, …: "
            f"{' '.join(by_position)}"
        )
        if drafter["reading_ms"]:
            call, each = drafter["reading_ms"]
            lines.append(f"  its draft reads a prompt in {call:.2f} ms a call and {each:.3f} ms a token")
        if standing := drafter["stood_beside"]:
            named = {f"+{shape}" if type(shape) is int else shape: tokens for shape, tokens in standing.items()}
            each = ", ".join(f"{name}: {tokens:.2f}" for name, tokens in named.items())
            lines.append(f"  where its line falls, tokens that stand beside it: {each}")
        for row in drafter["batches"]:
            k = row["best_draft_length"]
            best = f"best K {k}, {row['speed_up']:.2f} ×" if k else "no K pays"
            lines.append(f"  batch {row['batch']}: {best}; {row['oracle_speed_up']:.2f} × if K were always just right")
        if drafter["stops_paying_at"] is not None:
            lines.append(f"  speculation stops paying at batch {drafter['stops_paying_at']}")
    if result["spread"] > BUSY:
        lines.append(
            f"the middle half of equal rounds took times {result['spread']:.0%} apart, as on a busy machine: "
            "tune again when it is idle, or auto may choose badly"
        )
    return "\n".join([*lines, f"kept in {result['file']}; draft length auto is the default from now on"])


def _batches(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({batch_size(part) for part in text.split(",")}))
    except argparse.ArgumentTypeError:
        expected = f"expected whole numbers from 1 to {LARGEST_BATCH} like 1,2,4"
        raise argparse.ArgumentTypeError(f"{text[:40]!r}, {expected}") from None
