"""Measures the speed of each draft length, and compares it with what theory predicts."""

import argparse
import json
from typing import Any

from ...runtime.state.asked import AUTO
from ..console import in_bytes, table_of
from ..example_sources import PromptedDecoder
from ..flags.bench import PRINTED
from ..flags.engine import open_decoder
from ..in_words import lossy, on_device, pair, place
from ..measuring.bench import bench_params, measure_all
from ..pages.bench_page import report_page
from ..pages.charts import save, speed_over_draft_length
from ..timing.theirs import same_text
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
    params = bench_params(arguments)
    printed = arguments.json == PRINTED
    with (
        outputs(arguments, *(() if printed else ("json",)), "report", "plot") as out,
        open_decoder(arguments, max_batch=arguments.batch, kind=PromptedDecoder) as decoder,
    ):
        result = measure_all(decoder, params, arguments)
        print(json.dumps(result) if printed else _report(result))
        if "json" in out:
            print(json.dumps(result), file=out["json"])
        if "report" in out:
            out["report"].write(report_page(result))
        if "plot" in out:
            save(speed_over_draft_length(result), _title(result), arguments.plot, out["plot"])
    return 0


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
