"""The result of `trt-spec tune`, as JSON and as text."""

from statistics import median, quantiles
from typing import Any

from ...runtime import Speculation
from ...runtime.lengths.costs import Costs
from ...runtime.state.shapes import Shape
from ..console import table_of
from ..theory.lines import tokens_per_round
from ..timing.time_rounds import Measured, total
from .bench_result import setting_json

BUSY = 0.3  # the spread of rounds beyond which something else has run beside them
COLUMNS = {
    "drafter": ("drafter", ""),
    "batch": ("batch", ""),
    "K": ("shape", ""),
    "round ms": ("round_ms", ".2f"),
    "host ms": ("host_ms", ".2f"),
    "acceptance": ("acceptance", ".3f"),
    "tokens/round": ("tokens_per_round", ".2f"),
    "speed-up": ("speed_up", ".2f"),
    "predicted": ("predicted", ".2f"),
}

Grid = dict[tuple[str, int, int], Measured]  # by drafter, batch and draft length; "none" at 0
ShapeGrid = dict[tuple[str, int, Shape], Measured]  # combs, all of one line, and trees, by drafter and batch


def counts_of(grid: Grid, drafter: str) -> Speculation:
    """Add up the work of this drafter over all batches and draft lengths."""
    return total(one for (name, _, _), many in grid.items() if name == drafter for one in many.speculation)


def result_json(costs: Costs, grid: Grid, shapes: ShapeGrid) -> dict[str, Any]:
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
        "drafters": [_advice(costs, drafter, counts_of(grid, drafter)) for drafter in costs.acceptance],
    }


def _spread(measured: list[Measured]) -> float:
    """Return how far apart the middle half of a setting's rounds lie, over their median; of all settings the median."""
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


def report(result: dict[str, Any]) -> str:
    lines = [f"engine {result['engine']}", table_of(result["settings"], COLUMNS)]
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
            lines.append(f"  where its line is rejected, tokens accepted beside it: {each}")
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
