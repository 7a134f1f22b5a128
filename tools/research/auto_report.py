"""Measure what the draft length auto gains and costs: against no draft, every fixed length, and auto without trees.

All settings decode each prompt in turn, several times over, so that each ratio compares runs of one prompt that lie
side by side. With --batch N they decode a crowd of prompts, N at a time: each that ends makes room for the next,
outputs are between half and one and a half times as long as --new-tokens, and the time to read prompts counts.
Intervals are of 95 %, over prompts and repeats. Run trt-spec tune first.

    python -m trt_spec.tools.research.auto_report --bundle B [--batch N] [--drafter D] [--repeats N] [--json OUT]
"""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, stdev
from time import perf_counter
from typing import Any

from ...engines import RequestError
from ...runtime import Decoder, SamplingParams
from ...runtime.acceptance.parameter_fields import RULES
from ...runtime.drafters import DRAFTERS
from ...runtime.requests.prompts import Prompt
from ...runtime.state.asked import AUTO, MIXED, DraftLength
from ..console import progress, table
from ..flags.draft_lengths import fixed_lengths
from ..flags.engine import add_engine_flags, open_decoder
from ..flags.sampling import add_number, batch_size
from ..program import program
from ..prompts.shipped import WRITTEN, bench_prompts
from ..whole_file import outputs

SETS = (*WRITTEN, "random")
LENGTHS = (0, 1, 2, 3, 4, 6, 8)
# By the titles of their columns. Lines: what auto would choose if nothing had been measured beside a line.
SPEED_UPS = {AUTO: "auto_speed_up", f"{AUTO}, lines": "lines_speed_up"}
SPANS = {
    f"{AUTO} / K 0": "auto_against_plain",
    f"{AUTO} / best K": "auto_against_best",
    f"{AUTO} / lines": "auto_against_lines",
}
CROWD = 4  # requests for each that decodes at a time
GOLDEN = 0.618034  # its multiples spread evenly between whole numbers
SURE = 1.96  # standard errors to either side: 95 % if there are many runs
FEW = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)  # for 2, 3, … 11 of them (Student's t)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bundle", type=Path, required=True, metavar="B", help="the folder that export-models wrote")
    parser.add_argument(
        "--drafter", choices=(*DRAFTERS, MIXED), default="model", help="where proposals come from (default model)"
    )
    add_number(parser, "--repeats", 3, "runs of each prompt")
    add_number(parser, "--new-tokens", 256, "of each output")
    add_number(parser, "--batch", 1, "requests that decode at a time", batch_size)
    add_number(parser, "--temperature", 0.0, "0 is greedy", float, letter="X")
    parser.add_argument("--rule", choices=RULES, default=RULES[0], help=f"with a temperature (default {RULES[0]})")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the JSON object to this file as well")
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    params = SamplingParams(
        max_new_tokens=arguments.new_tokens,
        ignore_eos=True,
        temperature=arguments.temperature,
        rule=arguments.rule,
        seed=0,
    )
    with (
        outputs(arguments, "json") as out,
        open_decoder(arguments, max_batch=arguments.batch) as decoder,
        without_trees(decoder, arguments.device) or nullcontext() as lines,
    ):
        result = report(decoder, lines, arguments.drafter, params, arguments.repeats)
        if out:
            print(json.dumps(result), file=out["json"])
    print(shown(result))
    print(json.dumps(result))
    return 0


def without_trees(decoder: Decoder, device: str) -> Decoder | None:
    """Open the bundle once more, with the costs of lines alone; None if no others were measured."""
    if decoder.costs is None or not decoder.costs.beside:
        return None
    costs = replace(decoder.costs, beside=(), beside_ms={}, beside_tokens={})
    return Decoder(
        decoder.bundle,
        engine=decoder.engine,
        devices=[device],
        max_batch=decoder.max_batch,
        capture=True,
        cache_bytes=None,
        prefix_bytes=None,
        costs=costs,
    )


def report(
    decoder: Decoder, lines: Decoder | None, drafter: str, params: SamplingParams, repeats: int
) -> dict[str, Any]:
    decoders = [decoder, lines] if lines else [decoder]
    fixed = [k for k in fixed_lengths(None, LENGTHS, decoder) if k == 0 or drafter != MIXED]
    settings: list[tuple[Decoder, DraftLength]] = [*((decoder, k) for k in fixed), *((one, AUTO) for one in decoders)]
    seconds: dict[str, list[list[float]]] = {}  # by set: a row for each run of a prompt, a column for each setting
    longest = max(one.max_new_tokens for one in each_own(params, together(decoder.max_batch)))
    room = decoder.bundle.max_length - longest
    if room < 1:
        raise RequestError(
            f"outputs have up to {longest} tokens, and the bundle allows {decoder.bundle.max_length} tokens with "
            "the prompt; lower --new-tokens"
        )
    with progress("auto report", total=len(SETS) * repeats) as show:
        for kind in SETS:
            prompts = [fitted(decoder, prompt, room) for prompt in bench_prompts(kind, decoder.vocab_size)]
            for one, k in settings:
                decode(one, groups(prompts, decoder.max_batch)[0], params, k, drafter)  # warms up
            for one in decoders:
                one.settle()
            seconds[kind] = []
            for repeat in range(repeats):
                show(f"{kind}, repeat {repeat + 1} of {repeats}")
                for group in groups(prompts, decoder.max_batch, repeat):
                    seconds[kind].append([decode(one, group, params, k, drafter) for one, k in settings])
    return {
        "drafter": drafter,
        "batch": decoder.max_batch,
        "new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "rule": params.rule,
        "draft_lengths": fixed,
        "sets": {kind: compared(rows, fixed) for kind, rows in seconds.items()},
        "mixture": compared([row for rows in seconds.values() for row in rows], fixed),
    }


def together(batch: int) -> int:
    """Return how many prompts are decoded together."""
    return 1 if batch == 1 else CROWD * batch


def groups(prompts: Sequence[list[int]], batch: int, begin: int = 0) -> list[list[list[int]]]:
    """Return the prompts that are decoded together: each alone, or a crowd that begins with another one each time."""
    if batch == 1:
        return [[prompt] for prompt in prompts]
    return [[prompts[(begin + place) % len(prompts)] for place in range(together(batch))]]


def each_own(params: SamplingParams, count: int) -> list[SamplingParams]:
    """Return the parameters of each request: of a crowd each has a seed and a length of its own."""
    if count == 1:
        return [params]
    lengths = [max(1, round(params.max_new_tokens * (0.5 + GOLDEN * place % 1))) for place in range(count)]
    return [replace(params, seed=place, max_new_tokens=length) for place, length in enumerate(lengths)]


def decode(decoder: Decoder, prompts: Sequence[Prompt], params: SamplingParams, k: DraftLength, drafter: str) -> float:
    """Seconds for each token: of a prompt alone from the first round on, of a crowd from its arrival."""
    decoder.forget_outputs()
    began, before = perf_counter(), 0
    requests = [
        decoder.submit(prompt, own, draft_length=k, drafter=drafter if k else "none")
        for prompt, own in zip(prompts, each_own(params, len(prompts)), strict=True)
    ]
    if len(requests) == 1:
        while not requests[0].token_ids:
            decoder.step()
        began, before = perf_counter(), len(requests[0].token_ids)
    while decoder.step():
        pass
    elapsed, tokens = perf_counter() - began, sum(len(request.token_ids) for request in requests) - before
    if not tokens:
        raise RequestError(f"{params.max_new_tokens} new tokens are too few to time; raise --new-tokens")
    return elapsed / tokens


def fitted(decoder: Decoder, prompt: Prompt, room: int) -> list[int]:
    ids = decoder.tokenizer.encode(prompt).ids if isinstance(prompt, str) else list(prompt)
    return ids[-room:]


def compared(rows: Sequence[Sequence[float]], fixed: Sequence[int]) -> dict[str, Any]:
    """Compare auto, which follows the fixed ones, with K = 0, the best fixed one, and auto of lines if it is there."""
    means = [fmean(column) for column in zip(*rows, strict=True)]
    auto, best = len(fixed), min(range(len(fixed)), key=means.__getitem__)
    found = {
        "speed_ups": [means[0] / mean for mean in means[:auto]],
        "auto_speed_up": means[0] / means[auto],
        "best_draft_length": fixed[best],
        "auto_against_plain": interval([row[0] / row[auto] for row in rows]),
        "auto_against_best": interval([row[best] / row[auto] for row in rows]),
    }
    if len(means) > auto + 1:
        found |= {"lines_speed_up": means[0] / means[-1]}
        found |= {"auto_against_lines": interval([row[-1] / row[auto] for row in rows])}
    return found


def interval(ratios: Sequence[float]) -> dict[str, float]:
    """The geometric mean and its interval of 95 %."""
    logs = [log(ratio) for ratio in ratios]
    mean = fmean(logs)
    errors = dict(enumerate(FEW, 2)).get(len(logs), SURE)
    error = errors * stdev(logs) / sqrt(len(logs)) if len(logs) > 1 else float("inf")
    return {"mean": exp(mean), "low": exp(mean - error), "high": exp(mean + error)}


def shown(result: dict[str, Any]) -> str:
    sets = {**result["sets"], "mixture": result["mixture"]}
    speed_ups = {title: key for title, key in SPEED_UPS.items() if key in result["mixture"]}
    spans = {title: key for title, key in SPANS.items() if key in result["mixture"]}
    rows = [("prompts", *(f"K {k}" for k in result["draft_lengths"]), *speed_ups, *spans)]
    for name, one in sets.items():
        numbers = [*one["speed_ups"], *(one[key] for key in speed_ups.values())]
        intervals = ["{mean:.3f} ({low:.3f} to {high:.3f})".format_map(one[key]) for key in spans.values()]
        rows.append((name, *(f"{number:.2f}" for number in numbers), *intervals))
    return table(rows)


main = program("auto_report", __doc__, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
