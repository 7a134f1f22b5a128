"""Measures the speed of each draft length, and compares it with what theory predicts."""

import argparse
import json
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from ...engines import RequestError
from ...runtime import Decoder, SamplingParams
from ...runtime.drafters import usual_drafter
from ...runtime.state.asked import AUTO, DEFAULT_DRAFT_LENGTH, MIXED, DraftLength
from ...runtime.state.shapes import Shape
from ..console import in_bytes, progress, say, table_of
from ..example_sources import PromptedDecoder
from ..flags.bench import (
    DRAFT_LENGTHS,
    PRINTED,
    QUICK,
    QUICK_MODEL,
    QUICK_PROMPTS,
    add_arguments,
    quick_in_words,
    settle,
)
from ..flags.draft_lengths import fixed_lengths
from ..flags.engine import open_decoder
from ..flags.sampling import sampling_params
from ..in_words import lossy, on_device, pair, place
from ..measuring.bandwidth import read_bandwidth
from ..measuring.bench_result import Compared, bench_result, is_line
from ..measuring.conditions import memory_used
from ..measuring.kernels import kernels_per_round
from ..measuring.shipped_prompts import KINDS, bench_prompts
from ..measuring.theirs import Theirs, same_text
from ..measuring.time_rounds import Measured, Setting, measure, refuse_unfit
from ..measuring.whole_repeats import whole_repeats
from ..pages.bench_page import report_page
from ..pages.charts import save, speed_over_draft_length
from ..program import Parser
from ..whole_file import outputs

COLUMNS = {
    "K": ("title", ""),
    "tokens/s": ("tokens_per_second", ".1f"),
    "acceptance": ("acceptance", ".3f"),
    "tokens/round": ("tokens_per_round", ".2f"),
    "overhead": ("round_overhead", ".3f"),
    "bandwidth": ("bandwidth_share", ".0%"),
    "speed-up": ("speed_up", ".2f"),
    "predicted": ("predicted", ".2f"),
    "the paper's": ("paper", ".2f"),
}


def run(arguments: argparse.Namespace) -> int:
    params = _params(arguments)
    printed = arguments.json == PRINTED
    with (
        outputs(arguments, *(() if printed else ("json",)), "report", "plot") as out,
        open_decoder(arguments, max_batch=arguments.batch, kind=PromptedDecoder) as decoder,
    ):
        result = _measure_all(decoder, params, arguments)
        print(json.dumps(result) if printed else _report(result))
        if "json" in out:
            print(json.dumps(result), file=out["json"])
        if "report" in out:
            out["report"].write(report_page(result))
        if "plot" in out:
            save(speed_over_draft_length(result), _title(result), arguments.plot, out["plot"])
    return 0


def bench(decoder: Decoder, *flags: object) -> dict[str, Any]:
    """Measure in an open decoder what these flags of the command ask for, all its rows together."""
    parser = Parser(prog="bench")
    add_arguments(parser)
    given = ("--bundle", decoder.bundle.path, "--device", decoder.target.engine.device, "--batch", decoder.max_batch)
    arguments = parser.read([str(one) for one in (*given, *flags)])
    settle(arguments)
    return _measure_all(decoder, _params(arguments), arguments)


def _params(arguments: argparse.Namespace) -> SamplingParams:
    params = sampling_params(arguments, ignore_eos=True)  # so that all settings write as many tokens
    return replace(params, seed=params.seed or 0)


def _measure_all(decoder: Decoder, params: SamplingParams, arguments: argparse.Namespace) -> dict[str, Any]:
    assert params.seed is not None
    prompts = bench_prompts(arguments.prompts, decoder.vocab_size)
    if arguments.quick:
        if arguments.prompts in KINDS:
            prompts = prompts[: max(QUICK_PROMPTS, arguments.batch)]
        say(f"quick: {_quickly(arguments, len(prompts), params.max_new_tokens)}")
    whole_batches = -(-len(prompts) // arguments.batch) * arguments.batch  # a smaller one would not compare
    prompts = [prompts[i % len(prompts)] for i in range(whole_batches)]
    each = [replace(params, seed=params.seed + i) for i in range(len(prompts))]
    refuse_unfit(decoder, prompts, each)
    if arguments.compare and decoder.bundle.encoders:
        raise RequestError(
            f"--compare {arguments.compare} runs models without an encoder; in a clone, research.hearing compares a "
            "Whisper"
        )
    drafter = arguments.drafter or usual_drafter(decoder.bundle, decoder.drafters)
    settings = _settings(decoder, drafter, params, arguments)
    peer = None
    if arguments.compare:
        from ..peers.table import PEERS

        peer = PEERS[arguments.compare]
    folders = peer.find(arguments, decoder.bundle, drafter, params) if peer else {}
    measured = [Measured(setting) for setting in settings]
    theirs = [Theirs(one) for one in settings if peer and is_line(one)]
    compared = None
    groups = len(prompts) // arguments.batch  # that take as long as a warm-up each
    total = (1 + arguments.repeats * groups) * (len(measured) + len(theirs))
    with ExitStack() as stack, progress("bench", total=total) as show:
        for setting in settings:
            show(f"warming up {setting}")
            measure(decoder, prompts[: arguments.batch], each[: arguments.batch], Measured(setting))
        decoder.settle()
        memory = memory_used(arguments.device)
        turns = {str(one.setting): partial(measure, decoder, prompts, each, one) for one in measured}
        if peer:
            ids = [decoder.tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt for prompt in prompts]
            longest = max(map(len, ids)) + params.max_new_tokens
            other = stack.enter_context(peer.apart(arguments, decoder.bundle, folders, longest))
            runs_as = other.runs_as()
            for one in theirs:
                name = f"{one.setting} in {peer.name}"
                show(f"warming up {name}")
                other.measure(ids[: arguments.batch], each[: arguments.batch], Theirs(one.setting))
                turns[name] = partial(other.measure, ids, each, one)
            plain = decoder.generate(ids, each, draft_length=0, drafter="none") if params.greedy else None
            texts = None if plain is None else [output.token_ids for output in plain]
            compared = Compared(peer.name, peer.package, runs_as, theirs, texts)
        bandwidth = read_bandwidth(arguments.device)
        results = {str(one.setting): one for one in measured}

        def turn(repeat: int) -> None:
            for name in sorted(turns):  # theirs right after ours
                show(f"repeat {repeat + 1} of {arguments.repeats}, {name}", groups)
                turns[name]()
                if name in results:
                    say(f"{name}: {results[name].tokens_per_second[-1]:.1f} tokens/s")

        asked = arguments.repeats
        (measured, theirs), arguments.repeats = whole_repeats(arguments.repeats, turn, (measured, theirs))
        if compared is not None:
            compared = replace(compared, settings=theirs)
        if arguments.device.startswith("cuda") and arguments.repeats == asked:  # else somebody wants it to end
            for ours in measured:
                show(f"counting the kernels of {ours.setting}")
                group = prompts[: arguments.batch], each[: arguments.batch]
                ours.kernels_per_round = kernels_per_round(decoder, *group, ours.setting)
    bandwidth = max(bandwidth, read_bandwidth(arguments.device))
    return bench_result(decoder, measured, compared, bandwidth, memory, params, len(prompts), arguments)


def _quickly(arguments: argparse.Namespace, prompts: int, tokens: int) -> str:
    """Say what is measured, and how long that takes where the user has stated nothing else."""
    asked = quick_in_words(arguments.draft_lengths, prompts, tokens, arguments.repeats)
    usual = asked == QUICK and not (arguments.all_drafters or arguments.compare)
    return f"{asked}; less than two minutes for {QUICK_MODEL}" if usual else asked


def _settings(decoder: Decoder, drafter: str, params: SamplingParams, arguments: argparse.Namespace) -> list[Setting]:
    """Return what is to be measured; what cannot run is refused before anything is."""

    def refuse_unable(length: DraftLength) -> None:
        decoder.cancel(decoder.submit([0], params, draft_length=length, drafter=drafter))

    if drafter != MIXED:
        refuse_unable(min(1, decoder.longest_draft))
    fixed = fixed_lengths(arguments.draft_lengths, DRAFT_LENGTHS, decoder)
    settings = [Setting(k, drafter if k else "none") for k in fixed if not k or drafter != MIXED]
    for shape in arguments.draft_lengths or ():
        if isinstance(shape, Shape):
            refuse_unable(shape)
            settings.append(Setting(shape.length, drafter, shape=shape))
    if arguments.all_drafters:
        k = min(DEFAULT_DRAFT_LENGTH, decoder.longest_draft)
        settings += [Setting(k, other, other_drafter=True) for other in decoder.drafters if other != drafter]
    if AUTO in (arguments.draft_lengths or ()) or decoder.default_draft_length(drafter) == AUTO:
        refuse_unable(AUTO)
        settings.append(Setting(0, drafter, auto=True))
    return settings


def _title(result: dict[str, Any]) -> list[str]:
    prompts = "one prompt" if result["prompts"] == 1 else f"{result['prompts']} prompts"
    repeats = "one repeat" if result["repeats"] == 1 else f"{result['repeats']} repeats, each a tick"
    return [pair(result), place(result), f"{prompts}, {repeats}"]


def _report(result: dict[str, Any]) -> str:
    rows = [{"title": one["draft_length"], **one} for one in result["settings"]]
    rows += [{"title": one["shape"], **one} for one in result["shapes"]]
    rows += [{"title": f"{one['drafter']} {one['draft_length']}", **one} for one in result["drafters"]]
    if result["auto"]:
        rows.append({"title": AUTO, **result["auto"]})
    roof = result["roof"]
    note = "" if result["lossless"] else f"{lossy(result['sampling']['lenience'])}\n"
    theirs = _theirs(result["compared"]) if result["compared"] else ""
    launched = "".join(f"{on_device(row['title'], row)}\n" for row in rows if row.get("on_device"))
    if launched:
        launched += f"{result['recorded_kinds']} kinds of rounds are recorded\n"
    return (
        f"{table_of(rows, COLUMNS, left=0)}\n{note}{theirs}{launched}"
        f"the bare target takes {roof['bare_ms']:.2f} ms for one token, {roof['bare_over_roof']:.2f} × what reading "
        f"{in_bytes(roof['weight_bytes'])} of weights takes at {in_bytes(roof['bandwidth_bytes_per_second'])}/s"
    )


def _theirs(compared: dict[str, Any]) -> str:
    return "".join(
        f"{compared['name']}, K = {one['draft_length']}: {one['tokens_per_second']:.1f} tokens/s, "
        f"first token {one['first_token_ms']['p50']:.0f} ms, {same_text(one)}\n"
        for one in compared["settings"]
    )
