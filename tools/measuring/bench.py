"""Measure the settings of bench in turn, and another runtime with them."""

import argparse
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any

from ...runtime import Decoder, SamplingParams
from ...runtime.drafters import usual_drafter
from ...runtime.requests.prompts import Prompt
from ...runtime.state.asked import AUTO, DEFAULT_DRAFT_LENGTH, MIXED, DraftLength
from ...runtime.state.shapes import Shape
from ..console import progress, say
from ..flags.bench import (
    DRAFT_LENGTHS,
    QUICK,
    QUICK_PROMPTS,
    QUICK_WARM_UP,
    add_arguments,
    quick_in_words,
    settle,
)
from ..flags.draft_lengths import fixed_lengths
from ..flags.pace import QUICK_PROMISE, fitting, seconds_left
from ..flags.sampling import sampling_params
from ..program import Parser
from ..prompts.shipped import KINDS, bench_prompts
from ..timing.bandwidth import read_bandwidth
from ..timing.theirs import Theirs
from ..timing.time_rounds import Measured, Setting, measure, refuse_unfit
from .bench_result import Compared, bench_result, is_line
from .conditions import memory_used
from .kernels import kernels_per_round
from .whole_repeats import whole_repeats


def bench(decoder: Decoder, *flags: object) -> dict[str, Any]:
    """Measure in an open decoder what these flags of the command ask for, all its rows together."""
    parser = Parser(prog="bench")
    add_arguments(parser)
    given = ("--bundle", decoder.bundle.path, "--device", decoder.target.engine.device, "--batch", decoder.max_batch)
    arguments = parser.read([str(one) for one in (*given, *flags)])
    settle(arguments)
    return measure_all(decoder, bench_params(arguments), arguments)


def bench_params(arguments: argparse.Namespace) -> SamplingParams:
    params = sampling_params(arguments, ignore_eos=True)  # so that all settings write as many tokens
    return replace(params, seed=params.seed or 0)


def measure_all(decoder: Decoder, params: SamplingParams, arguments: argparse.Namespace) -> dict[str, Any]:
    assert params.seed is not None
    prompts = bench_prompts(arguments.prompts, decoder.vocab_size)
    timed = False
    if arguments.quick:
        if arguments.prompts in KINDS:
            prompts = prompts[: max(QUICK_PROMPTS, arguments.batch)]
        asked = quick_in_words(arguments.draft_lengths, len(prompts), params.max_new_tokens, arguments.repeats)
        timed = asked == QUICK and not (arguments.all_drafters or arguments.compare)
        say(f"quick: {asked}{f', or less, to take {QUICK_PROMISE}' if timed else ''}")
    whole_batches = -(-len(prompts) // arguments.batch) * arguments.batch  # a smaller one would not compare
    prompts = [prompts[i % len(prompts)] for i in range(whole_batches)]
    each = [replace(params, seed=params.seed + i) for i in range(len(prompts))]
    refuse_unfit(decoder, prompts, each)
    drafter = arguments.drafter or usual_drafter(decoder.bundle, decoder.drafters)
    settings = _settings(decoder, drafter, params, arguments)
    peer = None
    if arguments.compare:
        from ..peers.table import PEERS

        peer = PEERS[arguments.compare]
    folders = peer.find(arguments, decoder.bundle, drafter) if peer else {}
    measured = [Measured(setting) for setting in settings]
    theirs = [Theirs(one) for one in settings if peer and is_line(one)]
    compared = None
    groups = len(prompts) // arguments.batch  # that take as long as a warm-up each
    total = (1 + arguments.repeats * groups) * (len(measured) + len(theirs))
    first, began = each[: arguments.batch], monotonic()
    if timed:
        first = [replace(one, max_new_tokens=QUICK_WARM_UP) for one in first]
    with ExitStack() as stack, progress("bench", total=total) as show:
        for setting in settings:
            show(f"warming up {setting}")
            measure(decoder, prompts[: arguments.batch], first, Measured(setting))
        decoder.settle()
        if timed:
            seconds = (monotonic() - began) / first[0].max_new_tokens
            prompts, each = _that_fit(prompts, each, seconds, arguments)
            params = replace(params, max_new_tokens=each[0].max_new_tokens)
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


def _that_fit(
    prompts: list[Prompt], each: list[SamplingParams], seconds: float, arguments: argparse.Namespace
) -> tuple[list[Prompt], list[SamplingParams]]:
    """Return fewer prompts, and then shorter texts, if a token of each setting has taken so many seconds."""
    left, tokens, groups = seconds_left(arguments), each[0].max_new_tokens, len(prompts) // arguments.batch
    fit = fitting(groups, 1, seconds * tokens * groups, left)
    shorter = fitting(tokens, QUICK_WARM_UP, seconds * tokens, left) if fit == 1 else tokens
    count = fit * arguments.batch
    if (fit, shorter) != (groups, tokens):
        say(f"quick: there is time for {count} of {len(prompts)} prompts, {shorter} tokens each")
    return prompts[:count], [replace(one, max_new_tokens=shorter) for one in each[:count]]


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
