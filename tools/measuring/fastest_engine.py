"""Time the steps of a bundle's models in every engine that runs here, in turn, and find the fastest for each model.

The steps of an engine that can be recorded in CUDA graphs are, as in a decoder's rounds.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from statistics import geometric_mean, median

from ...engines import (
    ENGINES,
    GRANULE,
    Bundle,
    Engine,
    EngineError,
    Step,
    blank_cache,
    blank_step,
    open_engine,
    together,
)
from ...engines.bundle import DRAFT, HEAD, TARGET
from ..timing.bare_steps import BareSteps, stream_of_records

WIDTHS = {TARGET: (1, 3, 5), DRAFT: (1,), HEAD: (1,)}  # tokens of each request in the steps that are timed
PAST = 128  # tokens in the cache
REPEATS = 15
CLEARLY = 0.95  # smaller batches have another engine than larger ones if it takes less than this part of the time
LEFT_OUT = {("torch-compiled", "cpu")}  # a C++ compiler takes minutes, and ONNX Runtime is faster in the end

Times = dict[str, dict[str, dict[int, float]]]  # milliseconds of a step by model, engine and the largest batch


def fastest_engines(
    bundle: Bundle, device: str, batches: Sequence[int], show: Callable[[str], None]
) -> tuple[dict[int, str], Times]:
    """Return the engines, as `together` names them, that are fastest up to each batch, and the times.

    A time is the geometric mean of all steps of so many rows or fewer.
    """
    where = device.partition(":")[0]
    kinds = [
        one.name
        for one in ENGINES.values()
        if where in one.devices and not one.computes_in and (one.name, where) not in LEFT_OUT
    ]
    times: Times = {}
    for name in bundle.names:
        running = kinds
        medians: dict[str, dict[int, list[float]]] = {}
        for batch in batches:
            found = _time_steps(bundle, name, device, running, batch, show)
            running = list(found)
            for kind, own in found.items():
                medians.setdefault(kind, {})[batch] = own
        times[name] = {kind: {most: _mean_up_to(most, medians[kind]) for most in batches} for kind in running}
    target, *drafts = (times[name] for name in bundle.names)
    targets, for_drafts = _choose([target], batches), _choose(drafts, batches) if drafts else {}
    return {most: together(targets[most], for_drafts.get(most)) for most in batches}, times


def _time_steps(
    bundle: Bundle, name: str, device: str, kinds: Sequence[str], batch: int, show: Callable[[str], None]
) -> dict[str, list[float]]:
    """Return the milliseconds of a step of each width in each engine that runs them.

    They are opened for each batch anew, because one that prepares for numbers of tokens has room for a few only.
    """
    taken_ms: dict[str, dict[int, list[float]]] = {}
    with ExitStack() as opened:
        opened.enter_context(stream_of_records(device))
        steps: dict[tuple[str, int], Step] = {}
        engines: dict[str, Engine] = {}
        for kind in kinds:
            show(f"batch {batch}: opening the {name} in {kind}")
            try:
                engine = open_engine(kind, bundle.graph(name), bundle.models[name].contract, device)
                opened.callback(engine.close)
                cache = blank_cache(engine.contract, batch, PAST + GRANULE, device)
                widths = WIDTHS[bundle.models[name].kind]
                own = {(kind, width): blank_step(engine, cache, 0, batch, width, width) for width in widths}
                for step in (*own.values(), *own.values()):  # twice: engines prepare for steps that recur
                    step.start.fill_(PAST)
                    step.run()
            except EngineError as error:  # such as a compiler that is missing
                show(f"{kind} is left out: {error}")
                continue
            engine.settle()
            engines[kind] = engine
            steps |= own
        bare = {kind: BareSteps(device, engine.capturable()) for kind, engine in engines.items()}
        show(f"batch {batch}: timing the {name}")
        for _ in range(REPEATS):
            for (kind, width), step in steps.items():
                step.run()  # the first wakes the engine's threads, and gives its caches the size that is timed
                taken_ms.setdefault(kind, {}).setdefault(width, []).append(bare[kind].ms(step))
    return {kind: [median(found) for found in by_width.values()] for kind, by_width in taken_ms.items()}


def _mean_up_to(most: int, by_batch: Mapping[int, Sequence[float]]) -> float:
    return geometric_mean(ms for batch, each in by_batch.items() if batch <= most for ms in each)


def _choose(models: Sequence[Mapping[str, Mapping[int, float]]], batches: Sequence[int]) -> dict[int, str]:
    """Return the engine that runs all of these models fastest up to each batch.

    Up to a smaller batch it is another one only where that is clearly faster.
    """
    in_all = [kind for kind in models[0] if all(kind in times for times in models)]
    if not in_all:
        raise EngineError("no engine runs all drafts of the bundle; name one for each with --engine and --draft-engine")
    chosen: dict[int, str] = {}
    kept = None
    for most in sorted(batches, reverse=True):
        total = {kind: sum(times[kind][most] for times in models) for kind in in_all}
        fastest = min(in_all, key=total.__getitem__)
        if kept is None or total[fastest] < CLEARLY * total[kept]:
            kept = fastest
        chosen[most] = kept
    return chosen
