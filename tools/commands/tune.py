"""Measures what rounds cost here by draft length and batch, and keeps the table in the bundle."""

import argparse
import json
from dataclasses import replace
from statistics import median
from time import monotonic
from typing import Any

from ...engines import Bundle
from ...runtime import Decoder, SamplingParams
from ...runtime.drafters import DRAFTERS
from ...runtime.lengths.costs import Costs, machine_name, model_identities
from ...runtime.requests.prompts import Prompt
from ...runtime.scheduling.engine_choice import AUTO_ENGINE, save_choice
from ...runtime.state.shapes import MOST_CHILDREN, Shape, comb, tree
from ..console import progress, say, table
from ..example_sources import SourcedDecoder
from ..flags.draft_lengths import fixed_lengths
from ..flags.engine import engine_name
from ..flags.pace import QUICK_PROMISE, seconds_left
from ..flags.sampling import sampling_params
from ..flags.tune import DRAFT_LENGTHS, QUICK, quick_in_words
from ..measuring.fastest_engine import fastest_engines
from ..measuring.time_reading import reading_ms
from ..measuring.tune_result import Grid, ShapeGrid, counts_of, report, result_json
from ..measuring.whole_repeats import whole_repeats
from ..prompts.shipped import bench_prompts
from ..timing.time_rounds import Measured, Setting, measure, refuse_unfit, total
from ..whole_file import outputs

MORE_THAN_WARM_UP = 5  # times what batch 1 warms up in: its repeat, and batch 2, which takes twice that, twice
MOST_OF_COPY = 8  # proposals with which a drafter that costs as much as another is measured
SIBLINGS = (1, 2, 4, 8)  # measured beside one line
LINE_OF_COMB = 4  # or the longest measured line below it
TREES = tuple(tree(length, nodes - length) for length, nodes in ((4, 8), (4, 16), (8, 16), (8, 32)))


def run(arguments: argparse.Namespace) -> int:
    if arguments.quick:
        say(f"quick: {_quickly(arguments)}")
    params = sampling_params(arguments, ignore_eos=True)
    params = replace(params, seed=params.seed or 0)
    engine, bundle = engine_name(arguments), Bundle.open(arguments.bundle)
    prompts = bench_prompts(arguments.prompts, bundle.tokenizer.vocab_size)
    with outputs(arguments, "json") as out:
        engines = _fastest(bundle, arguments) if engine == AUTO_ENGINE else {max(arguments.batches): engine}
        # Each table tells of all batches, because a decoder may also open its engine by name.
        each = list(dict.fromkeys(reversed(engines.values())))
        results = _tune_each(bundle, each, arguments, prompts, params)
        result = results[0] | {"engines": engines, "other_engines": results[1:]}
        if engine == AUTO_ENGINE:
            say(f"engine auto is these from now on; kept in {save_choice(bundle, arguments.device, engines)}")
        if out:
            print(json.dumps(result), file=out["json"])
    print("\n\n".join(map(report, results)))
    print(json.dumps(result))
    return 0


def _quickly(arguments: argparse.Namespace) -> str:
    """Say what is measured, and how long that takes at most."""
    asked = quick_in_words(arguments.draft_lengths, arguments.batches, arguments.max_new_tokens, arguments.repeats)
    return f"{asked}, or less, to take {QUICK_PROMISE}" if _timed(arguments) else asked


def _timed(arguments: argparse.Namespace) -> bool:
    """Tell whether the clock bounds what is measured: where the user has stated nothing else."""
    asked = quick_in_words(arguments.draft_lengths, arguments.batches, arguments.max_new_tokens, arguments.repeats)
    return arguments.quick and asked == QUICK and arguments.engine != AUTO_ENGINE and not arguments.all_drafts


def _fastest(bundle: Bundle, arguments: argparse.Namespace) -> dict[int, str]:
    """Find out and say which engines run each model fastest up to each batch."""
    fastest, times = fastest_engines(bundle, arguments.device, arguments.batches, say)
    rows = [
        (model, engine, *(f"{ms:.2f}" for ms in by_batch.values()))
        for model, by_engine in times.items()
        for engine, by_batch in by_engine.items()
    ]
    header = ("model", "engine", *(f"batch {batch}" for batch in arguments.batches))
    say(f"milliseconds of a step, the mean up to each batch:\n{table([header, *rows], left=2)}")
    say("; ".join(f"up to batch {batch}: engine {engine}" for batch, engine in fastest.items()))
    return fastest


def _tune_each(
    bundle: Bundle, engines: list[str], arguments: argparse.Namespace, prompts: list[Prompt], params: SamplingParams
) -> list[dict[str, Any]]:
    """Return what was found in each engine; an interruption keeps that of those which were measured before."""
    results: list[dict[str, Any]] = []
    whole = True
    try:
        while whole and len(results) < len(engines):
            result, whole = _tune(bundle, engines[len(results)], arguments, prompts, params)
            results.append(result)
    except KeyboardInterrupt:
        if not results:
            raise
    if left := engines[len(results) :]:
        say(f"interrupted: engine {' and '.join(left)} was not measured")
    return results


def _tune(
    bundle: Bundle, engine: str, arguments: argparse.Namespace, prompts: list[Prompt], params: SamplingParams
) -> tuple[dict[str, Any], bool]:
    """Return what was found in an engine, and whether no interruption made the repeats fewer."""
    with SourcedDecoder.open(bundle, engine, arguments.device, max(arguments.batches)) as decoder:
        lengths = fixed_lengths(arguments.draft_lengths, DRAFT_LENGTHS, decoder)
        refuse_unfit(decoder, prompts, [params] * len(prompts))
        (measured, shapes), repeats = _measure_all(decoder, lengths, arguments, prompts, params)
        costs = _costs(decoder, measured, shapes, arguments)
        result = result_json(costs, measured, shapes) | {"file": str(costs.save(bundle))}
        return result, repeats == arguments.repeats


def _measure_all(
    decoder: Decoder, lengths: list[int], arguments: argparse.Namespace, prompts: list[Prompt], params: SamplingParams
) -> tuple[tuple[Grid, ShapeGrid], int]:
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
    shapes: ShapeGrid = {
        (drafter, batch, shape): Measured(Setting(shape.length, drafter, shape=shape))
        for batch in arguments.batches
        for drafter in filter(_has_shapes, drafters)
        for shape in ([] if arguments.quick else _shapes(decoder, drafters, lengths, params))
    }
    turns = [(batch, one) for measured in (grid, shapes) for (_, batch, _), one in measured.items()]
    with progress("tune", total=(1 + arguments.repeats) * len(turns)) as show:

        def run_all(repeat: int, batches: tuple[int, ...]) -> None:
            assert params.seed is not None
            stage = f"repeat {repeat} of {arguments.repeats}" if repeat else "warming up"
            for batch, one in [turn for turn in turns if turn[0] in batches]:
                show(f"{stage}, batch {batch}, {one.setting.drafter}, {one.setting}")
                chosen = [prompts[(repeat * batch + i) % len(prompts)] for i in range(batch)]
                each = [replace(params, seed=params.seed + repeat * batch + i) for i in range(batch)]
                measure(decoder, chosen, each, one if repeat else Measured(one.setting))
                if repeat:
                    rate = one.tokens_per_second[-1]
                    say(f"batch {batch}, {one.setting.drafter}, {one.setting}: {rate:.1f} tokens/s")

        began, (first, *more) = monotonic(), arguments.batches
        run_all(0, (first,))
        if more and _timed(arguments) and (monotonic() - began) * MORE_THAN_WARM_UP > seconds_left(arguments):
            say(f"quick: there is time for batch {first} alone")
            arguments.batches, more = (first,), []
            grid = {key: one for key, one in grid.items() if key[1] == first}
        run_all(0, tuple(more))
        decoder.settle()
        return whole_repeats(arguments.repeats, lambda repeat: run_all(repeat + 1, arguments.batches), (grid, shapes))


def _has_shapes(drafter: str) -> bool:
    return DRAFTERS[drafter].needs_model and DRAFTERS[drafter].samples


def _shapes(decoder: Decoder, drafters: list[str], lengths: list[int], params: SamplingParams) -> list[Shape]:
    """Return the combs and trees that all of these can make here, beside lines that are measured as well."""
    line, most = max(k for k in lengths if k <= LINE_OF_COMB), decoder.largest_comb
    shapes = [comb(line, count) for count in SIBLINGS if count <= (MOST_CHILDREN - 1) * line]
    able = all(name in decoder.growing for name in drafters if _has_shapes(name))  # of one table all have the same
    shapes += [tree for tree in TREES if tree.length in lengths and able]
    by_chance = params.test != "coupled"
    return [one for one in shapes if one.beyond <= most - (decoder.longest_draft if by_chance else one.length)]


def _costs(decoder: Decoder, grid: Grid, shapes: ShapeGrid, arguments: argparse.Namespace) -> Costs:
    lengths = tuple(sorted({k for _, _, k in grid}))
    drafters = [name for name in dict.fromkeys(drafter for drafter, _, _ in grid) if name != "none"]
    counts = {drafter: counts_of(grid, drafter) for drafter in drafters}
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
            name: reading_ms(decoder, decoder.models[run])
            for name in drafters
            if (run := DRAFTERS[name].model_name(decoder.bundle)) is not None
        },
        **_costs_beside(grid, shapes, arguments.batches),
    )


def _costs_beside(grid: Grid, shapes: ShapeGrid, batches: tuple[int, ...]) -> dict[str, Any]:
    """Return what siblings and branches add to the round of their line, and what is accepted where it fails."""
    names = list(dict.fromkeys(drafter for drafter, _, _ in shapes))
    each = list(dict.fromkeys(shape for _, _, shape in shapes))

    def added_ms(drafter: str, batch: int, shape: Shape) -> float:
        line = grid[drafter, batch, shape.length]
        return max(0.0, median(shapes[drafter, batch, shape].round_ms) - median(line.round_ms))

    def accepted(drafter: str, shape: Shape) -> float:
        seen = total(one for batch in batches for one in shapes[drafter, batch, shape].speculation)
        return seen.accepted_beside or 0.0

    return {
        "beside": tuple(shape.beyond if shape.leaves else str(shape) for shape in each),
        "beside_ms": {
            name: tuple(tuple(added_ms(name, batch, shape) for shape in each) for batch in batches) for name in names
        },
        "beside_tokens": {name: tuple(accepted(name, shape) for shape in each) for name in names},
    }


def _measured_as(drafter: str) -> str:
    return DRAFTERS[drafter].costs_as or drafter
