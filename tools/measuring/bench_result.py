"""The result of bench: the JSON object that its table, charts and page are made of."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ...engines import Bundle
from ...engines.bundle import TARGET
from ...runtime import Decoder, SamplingParams
from ..flags.bench import BENCH_SAMPLING
from ..in_words import draft_of
from ..theory.lines import tokens_per_round
from ..timing.theirs import Texts, Theirs
from ..timing.time_rounds import PARTS, Measured, Setting, total
from .bytes_read import round_bytes_read, weight_bytes_read
from .conditions import conditions


@dataclass(frozen=True)
class Compared:
    """A peer that took turns, and our own text where both must write one."""

    name: str
    package: str
    runs_as: dict[str, Any]
    settings: list[Theirs]
    texts: Texts | None

    def to_json(self) -> dict[str, Any]:
        settings = [one.to_json(self.texts) for one in self.settings]
        return {"name": self.name, "runs_as": self.runs_as, "settings": settings}


def bench_result(
    decoder: Decoder,
    measured: Sequence[Measured],
    compared: Compared | None,
    bandwidth: float,
    memory: dict[str, int | None],
    params: SamplingParams,
    prompts: int,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    bundle, plain = decoder.bundle, measured[0]
    drafter = [one.setting.drafter for one in measured if not one.setting.other_drafter][-1]
    target, weight_bytes = bundle.target, weight_bytes_read(bundle, TARGET)
    roof_ms = 1e3 * weight_bytes / bandwidth

    def of_setting(one: Measured) -> dict[str, Any]:
        on_device = device_json(one) if decoder.recorded or one.kernels_per_round is not None else None
        return setting_json(one, plain) | bandwidth_json(bundle, one, bandwidth) | {"on_device": on_device}

    return {
        "bundle": str(arguments.bundle),
        "target": target.name,
        "weights": target.contract.dtype if target.weights == "none" else target.weights,
        "draft": draft_of(bundle, drafter),
        "engine": decoder.engine,
        "device": arguments.device,
        "drafter": drafter,
        "batch": arguments.batch,
        "prompts": prompts,
        "prompts_from": arguments.prompts,
        "repeats": arguments.repeats,
        "lossless": not params.lenient,
        "sampling": {name: getattr(params, name) for name in BENCH_SAMPLING},
        "roof": {
            "weight_bytes": weight_bytes,
            "bandwidth_bytes_per_second": bandwidth,
            "roof_ms": roof_ms,
            "bare_ms": plain.verify_ms,
            "bare_over_roof": plain.verify_ms / roof_ms,
        },
        "memory": memory,
        "conditions": conditions(bundle, decoder.engine, arguments.device, [compared.package] if compared else []),
        "recorded_kinds": decoder.recorded_kinds,
        "settings": [of_setting(one) for one in measured if is_line(one.setting)],
        "shapes": [{"shape": str(one.setting.shape), **of_setting(one)} for one in measured if one.setting.shape],
        "drafters": [
            {"drafter": one.setting.drafter, **of_setting(one)} for one in measured if one.setting.other_drafter
        ],
        "auto": next((auto_json(one, plain) for one in measured if one.setting.auto), None),
        "compared": compared.to_json() if compared else None,
    }


def is_line(setting: Setting) -> bool:
    """Tell whether it is a fixed K of the drafter whose lengths are compared."""
    return not (setting.auto or setting.other_drafter or setting.shape)


def auto_json(measured: Measured, plain: Measured) -> dict[str, Any]:
    """The setting whose draft length was chosen for each round."""
    counts = total(measured.speculation)
    speed_ups = zip(measured.tokens_per_second, plain.tokens_per_second, strict=True)
    return {
        "drafter": measured.setting.drafter,
        "tokens_per_second": median(measured.tokens_per_second),
        "tokens_per_second_each": measured.tokens_per_second,
        "acceptance": counts.acceptance,
        "tokens_per_round": counts.tokens_per_round,
        "mean_draft_length": counts.proposed / counts.rounds,
        "speed_up": median(ours / theirs for ours, theirs in speed_ups),
        **measured.waits.to_json(),
        "speculation": counts.to_json(),
    }


def bandwidth_json(bundle: Bundle, measured: Measured, bandwidth: float) -> dict[str, float]:
    """What a round has to read, and the share of the memory's bandwidth that this is over its time."""
    read = round_bytes_read(bundle, measured)
    share = read / (1e-3 * median(measured.round_ms) * bandwidth)
    return {"bytes_per_round": read, "bandwidth_share": share}


def device_json(measured: Measured) -> dict[str, float | None]:
    """How rounds were launched, and how long the device waits between them, by the clock of the device."""
    gaps = [one.ms - sum(one.parts_ms[:-1]) for one in measured.lasting]
    return {
        "replayed_share": sum(one.replayed for one in measured.rounds) / len(measured.rounds),
        "gap_ms": median(gaps),
        "kernels_per_round": measured.kernels_per_round,
    }


def setting_json(measured: Measured, plain: Measured) -> dict[str, Any]:
    """The times of a setting, and the speed-up that theory predicts from its measured c, v and α alone.

    The paper's formula takes a pass over K + 1 tokens for as long as one over a single token.
    """
    k, t = measured.setting.draft_length, plain.verify_ms
    rate = median(measured.tokens_per_second)
    counts = total(measured.speculation)
    alpha = counts.acceptance
    c, v = measured.draft_ms / k / t if k else 0.0, measured.verify_ms / t
    proposing = sum(counts.histogram) / counts.rounds  # some drafters propose only where they find a match
    each = (tokens_per_round(alpha or 0.0, one.proposed) * rounds for one, rounds in counts.outcomes.items())
    expected = sum(each) / counts.rounds
    in_a_tree = measured.setting.is_tree or counts.beside
    return {
        "draft_length": k,
        "tokens_per_second": rate,
        "tokens_per_second_each": measured.tokens_per_second,
        "acceptance": alpha,
        "tokens_per_round": counts.tokens_per_round,
        "round_overhead": measured.round_overhead,
        "speed_up": rate / median(plain.tokens_per_second),
        "predicted": None if in_a_tree else expected / (c * k + v),
        "paper": None if in_a_tree else expected / (c * k + 1),
        "c": c,
        "v": v,
        "proposing": proposing,
        "round_ms": median(measured.round_ms),
        "parts_ms": dict(zip(PARTS, map(median, zip(*measured.parts_ms, strict=True)), strict=True)),
        "draft_ms": measured.draft_ms,
        "verify_ms": measured.verify_ms,
        **measured.waits.to_json(),
        "speculation": counts.to_json(),
    }
