"""Time the steps of a bundle's models in every engine that runs here, in turn, and find the fastest for each model."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import product
from statistics import geometric_mean, median
from time import perf_counter

from ...engines import ENGINES, GRANULE, Bundle, EngineError, blank_cache, blank_step, open_engine, together
from ...engines.bundle import DRAFT, TARGET

WIDTHS = {TARGET: (1, 3, 5), DRAFT: (1,)}  # tokens of each request in the steps that are timed
PAST = 128  # tokens in the cache
REPEATS = 15
SLOW_TO_COMPILE = "torch-compiled"

Times = dict[str, dict[str, float]]  # milliseconds of a step, the geometric mean of all, by model and engine


def fastest_engines(
    bundle: Bundle, device: str, batches: Sequence[int], show: Callable[[str], None]
) -> tuple[str, Times]:
    """Return the fastest engines at the smallest and largest batch, as `together` names them, and the times."""
    kinds = [one.name for one in ENGINES.values() if device.partition(":")[0] in one.devices and not one.computes_in]
    times: Times = {}
    for name in bundle.names:
        times[name] = {}
        seconds: dict[str, dict[tuple[int, int], list[float]]] = {}
        with ExitStack() as opened:
            runs, engines = {}, []
            for kind in kinds:
                if kind == SLOW_TO_COMPILE:
                    continue
                show(f"opening the {name} in {kind}")
                try:
                    engine = open_engine(kind, bundle.graph(name), bundle.models[name].contract, device)
                except EngineError as error:
                    show(f"{kind} is left out: {error}")
                    continue
                opened.callback(engine.close)
                engines.append(engine)
                cache = blank_cache(engine.contract, max(batches), PAST + GRANULE, device)
                for batch, width in product({min(batches), max(batches)}, WIDTHS[bundle.models[name].kind]):
                    step = blank_step(engine, cache, 0, batch, width, width)
                    step.start.fill_(PAST)
                    runs[kind, (batch, width)] = step.run
            for run in (*runs.values(), *runs.values()):  # twice: engines prepare for steps that recur
                run()
            for engine in engines:
                engine.settle()
            show(f"timing the {name}")
            for _ in range(REPEATS):
                for (kind, size), run in runs.items():
                    run()  # the first wakes the engine's threads, and gives its caches the size that is timed
                    began = perf_counter()
                    run()
                    seconds.setdefault(kind, {}).setdefault(size, []).append(perf_counter() - began)
        for kind, by_size in seconds.items():
            times[name][kind] = 1e3 * geometric_mean(map(median, by_size.values()))
    target, *drafts = (times[name] for name in bundle.names)
    return together(_fastest([target]), _fastest(drafts) if drafts else None), times


def _fastest(models: Sequence[dict[str, float]]) -> str:
    """Return the engine that runs all of these models in the least time, of those that run each of them."""
    in_all = [kind for kind in models[0] if all(kind in times for times in models)]
    if not in_all:
        raise EngineError("no engine runs all drafts of the bundle; name one for each with --engine and --draft-engine")
    return min(in_all, key=lambda kind: sum(times[kind] for times in models))
