"""Predict what a bundle does on a GPU: the steps of each model, and greedy rounds without and with its draft."""

from collections.abc import Iterable
from typing import Any

from ...engines import Bundle
from ...engines.bundle import DRAFT, TARGET
from ...runtime.memory.bucket import SHORTEST, bucket
from ..console import in_bytes, table_of
from .bytes_read import cache_bytes_read, weight_bytes_read
from .gpu_figures import figures, worst_error
from .gpu_model import predicted_ms
from .gpu_steps import Counted, WeightlessEngine, count_round, count_step
from .gpus import Gpu

STEPS = {
    "model": ("model", ""),
    "width": ("width", ""),
    "kernels a layer": ("kernels_per_layer", ""),
    "kernels": ("kernels", ","),
    "ms": ("ms", ".3f"),
    "of the bandwidth": ("bandwidth_share", ".0%"),
}
ROUNDS = {
    "K": ("draft_length", ""),
    "kernels": ("kernels", ","),
    "ms": ("ms", ".3f"),
    "tokens/s at most": ("most_tokens_per_second", ",.0f"),
}


def predict(bundle: Bundle, gpu: Gpu, batch: int, draft_length: int, length: int = SHORTEST) -> dict[str, Any]:
    """Return the steps and the greedy rounds of so many requests, which have `length` tokens each."""
    engines = {name: WeightlessEngine(bundle, name) for name in bundle.names}
    entries = bucket(length, bundle.capacity)
    steps = []
    for name, engine in engines.items():
        for width in (1, draft_length + 1) if name == TARGET else (1,):
            counted = count_step(engine, batch, width, entries)
            read = weight_bytes_read(bundle, name) + cache_bytes_read(bundle, name, batch * length)
            ms = predicted_ms(counted.launches, gpu)
            share = read / (1e-3 * ms * gpu.bandwidth)
            of_layer = {"kernels_per_layer": counted.kernels_per_layer, "bandwidth_share": share}
            steps.append({"model": name, "width": width, **_kernels(counted, gpu), **of_layer})
    plain = {TARGET, DRAFT} == set(bundle.names)  # heads and their like read what a round here has not
    rounds = []
    for k in (0, draft_length) if plain else (0,):
        models = engines if k else {TARGET: engines[TARGET]}
        row = _kernels(count_round(bundle, models, batch, k, entries), gpu)
        rounds.append({"draft_length": k, **row, "most_tokens_per_second": 1e3 * batch * (k + 1) / row["ms"]})
    return {
        "gpu": gpu.name,
        "bandwidth_bytes_per_second": gpu.bandwidth,
        "calibrated_on": figures()["measured_on"],
        "worst_error_there": worst_error(),
        "batch": batch,
        "length": length,
        "step_bytes": max(engine.step_bytes(batch, bundle.capacity) for engine in engines.values()),
        "steps": steps,
        "rounds": rounds,
    }


def predicted_rounds_ms(bundle: Bundle, gpu: Gpu, batch: int, draft_lengths: Iterable[int]) -> dict[int, float]:
    """Return the milliseconds of greedy rounds by K, of a bundle with a plain draft."""
    engines = {name: WeightlessEngine(bundle, name) for name in bundle.names}
    return {k: predicted_ms(count_round(bundle, engines, batch, k).launches, gpu) for k in draft_lengths}


def _kernels(counted: Counted, gpu: Gpu) -> dict[str, Any]:
    return {"kernels": len(counted.launches), "ms": predicted_ms(counted.launches, gpu)}


def prediction_report(found: dict[str, Any]) -> str:
    bandwidth = found["bandwidth_bytes_per_second"]
    return "\n".join(
        [
            f"a prediction, which no GPU has given: engine torch on {found['gpu']} that reads {bandwidth / 1e9:,.0f} "
            f"GB/s, batch {found['batch']}, {found['length']:,} tokens each",
            f"calibrated on {found['calibrated_on']}, whose figures it gives within {found['worst_error_there']:.0%}",
            f"attention takes up to {in_bytes(found['step_bytes'])} meanwhile, beside weights and caches",
            "",
            table_of(found["steps"], STEPS, left=1),
            "",
            "greedy rounds; tokens/s if every proposal were accepted",
            table_of(found["rounds"], ROUNDS, left=0),
        ]
    )
