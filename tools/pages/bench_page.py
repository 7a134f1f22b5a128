"""Make a page of charts and tables from the JSON object of a bench run.

python -m trt_spec.tools.pages.bench_page RESULT.json OUT.html
"""

import argparse
import json
import sys
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from ...engines import RequestError
from ...engines.errors import counted
from ..console import in_bytes
from ..drawable import require_matplotlib
from ..in_words import lossy, on_device, pair, place
from ..program import program
from ..text_files import read_text
from ..timing.theirs import same_text
from ..timing.time_rounds import PERCENTILES
from ..whole_file import whole_file
from .charts import (
    acceptance_by_position,
    accepted_histogram,
    bandwidth_over_draft_length,
    inline_svg,
    round_timeline,
    speed_over_draft_length,
)
from .page import page

STYLE = """
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .75rem; margin: 1.5rem 0;
  padding: 0; list-style: none; }
.figures li { padding: .75rem 1rem; border-radius: .5rem; background: var(--card); color: var(--muted);
  font-size: .9rem; line-height: 1.35; }
.figures b { display: block; color: var(--ink); font-size: 1.5rem; font-weight: 600; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); gap: 2.5rem 3rem; }
figure { display: flex; flex-direction: column; margin: 0; }
figure svg { width: 100%; max-width: 36rem; height: auto; margin-top: auto; }
svg text { font-family: system-ui, sans-serif !important; }
figcaption p, .muted { font-size: .9rem; }
section { margin-top: 2.5rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .75rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { color: var(--muted); font-weight: 500; }
tr > :first-child { position: sticky; left: 0; padding-left: 0; background: var(--paper); text-align: left; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.25rem; margin: .5rem 0; font-size: .9rem; }
dt { color: var(--muted); }
dd { margin: 0; overflow-wrap: anywhere; }
pre { overflow-x: auto; padding: 1rem; border-radius: .5rem; background: var(--card); font-size: .8rem; }
@media (max-width: 30rem) { dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .5rem; } }
"""
COLUMNS = ("tokens/s", "acceptance", "tokens/round", "overhead", "bandwidth", "speed-up", "predicted", "the paper's")
WAITS = {"first_token_ms": "first token, ms", "between_tokens_ms": "between tokens, ms"}


def report_page(result: dict[str, Any]) -> str:
    plain, *drafted = result["settings"]
    fastest = max(drafted, key=lambda one: one["tokens_per_second"], default=None)
    body = [
        f"<h1>{escape(pair(result))}</h1>",
        f'<p class="muted">{escape(_where(result))}</p>',
        _key_figures(result, fastest),
        f'<div class="charts">{"".join(_charts(result, plain, fastest))}</div>',
        _section("All settings", _table(result), _table_note(result)),
        _section("Conditions", _definitions(_conditions(result))),
        f"<section><details><summary>All numbers, as JSON</summary><pre>{escape(json.dumps(result, indent=1))}</pre>"
        "</details></section>",
    ]
    return page(f"{pair(result)}: bench of trt-spec", STYLE, "\n".join(body))


def _where(result: dict[str, Any]) -> str:
    day, time = result["conditions"]["measured_at"][:16].split("T")
    return f"{place(result)}, measured {day} {time} UTC"


def _key_figures(result: dict[str, Any], fastest: dict[str, Any] | None) -> str:
    plain = result["settings"][0]
    figures = [(f"{plain['tokens_per_second']:.1f}", "tokens/s without a draft")]
    if fastest is not None:
        k, predicted = fastest["draft_length"], fastest["predicted"]
        figures += [
            (f"{fastest['tokens_per_second']:.1f}", f"tokens/s at K = {k}, the fastest"),
            (f"{fastest['speed_up']:.2f} ×", "as fast" + (f"; predicted {predicted:.2f} ×" if predicted else "")),
            (_optional(fastest["acceptance"]), "acceptance α, of proposals examined"),
            (f"{fastest['tokens_per_round']:.2f}", f"tokens a round of at most {k + 1}"),
        ]
    if compared := result["compared"]:
        sides = compared["settings"], result["settings"]
        best, ours = (max(one["tokens_per_second"] for one in side) for side in sides)
        figures.append((f"{ours / best:.2f} ×", f"the fastest setting of {compared['name']}"))
    return f'<ul class="figures">{"".join(f"<li><b>{a}</b>{escape(b)}</li>" for a, b in figures)}</ul>'


def _charts(result: dict[str, Any], plain: dict[str, Any], fastest: dict[str, Any] | None) -> Iterable[str]:
    yield _figure(
        "Speed over K",
        "The line is the median of the repeats, each of which is a tick. Predicted: from "
        "the acceptance and the bare costs of draft and verify alone.",
        inline_svg(speed_over_draft_length(result), "speed", "Tokens per second over K"),
    )
    yield _figure(
        "Bandwidth over K",
        "The weights of a round's steps and what their caches hold, over its time: the share of what the memory reads.",
        inline_svg(bandwidth_over_draft_length(result), "bandwidth", "Share of the memory's bandwidth over K"),
    )
    if fastest is None:
        return
    k = fastest["draft_length"]
    yield _figure(
        f"One round at K = {k}",
        f"Its parts, and those of a round without a draft, medians. A round at K = {k} brought "
        f"{fastest['tokens_per_round']:.2f} tokens, one without a draft 1. The bare runs are the engine alone.",
        inline_svg(round_timeline(plain, fastest), "round", "The parts of a round in milliseconds"),
    )
    if fastest["acceptance"] is None:
        return
    yield _figure(
        f"Accepted at K = {k}",
        "Of the rounds that proposed: how many of the proposals each accepted.",
        inline_svg(accepted_histogram(fastest), "accepted", "Rounds by accepted proposals"),
    )
    yield _figure(
        f"Acceptance by position at K = {k}",
        "A proposal is examined if all before it are accepted. The prediction takes every position for α.",
        inline_svg(acceptance_by_position(fastest), "position", "Acceptance by position in the proposal"),
    )


def _figure(title: str, note: str, svg: str) -> str:
    words = f"<h2>{escape(title)}</h2><p class=muted>{escape(note)}</p>"
    return f"<figure><figcaption>{words}</figcaption>{svg}</figure>"


def _section(title: str, content: str, note: str = "") -> str:
    return f"<section><h2>{title}</h2>{content}<p class=muted>{note}</p></section>"


def _table(result: dict[str, Any]) -> str:
    rows = [_row(str(one["draft_length"]), one) for one in result["settings"]]
    rows += [_row(one["shape"], one) for one in result["shapes"]]
    rows += [_row(f"{one['draft_length']}, {one['drafter']}", one) for one in result["drafters"]]
    rows += [_row(f"auto, {one['drafter']}", one) for one in [result["auto"]] if one is not None]
    if compared := result["compared"]:
        rows += [_row(f"{one['draft_length']}, {compared['name']}", one) for one in compared["settings"]]
    groups = "".join(f"<th colspan=2>{title}</th>" for title in WAITS.values())
    names = "".join(
        f"<th>{name}</th>" for name in ("K", *COLUMNS, *(f"p{share}" for _ in WAITS for share in PERCENTILES))
    )
    head = f"<tr><th colspan={1 + len(COLUMNS)}></th>{groups}</tr><tr>{names}</tr>"
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead>{head}</thead><tbody>{lines}</tbody></table></div>'


def _row(name: str, one: dict[str, Any]) -> list[str]:
    """A row of another runtime has only a rate and waits."""
    keys = ("acceptance", "tokens_per_round", "round_overhead", "bandwidth_share", "speed_up", "predicted", "paper")
    waits = [f"{one[kind][f'p{share}']:.1f}" for kind in WAITS for share in PERCENTILES]
    return [name, f"{one['tokens_per_second']:.1f}", *(_optional(one.get(key)) for key in keys), *waits]


def _table_note(result: dict[str, Any]) -> str:
    return (
        "Overhead: a round over the bare engine runs in it. Bandwidth: what its steps have to read over its time, as a "
        "share of what the memory reads. Predicted: by the acceptance and the measured costs of draft steps and of the "
        "pass that verifies; the paper's formula takes that wider pass for free. The tokens of a round come together: "
        "the first of them has waited for the round, the others for nothing. "
        f"The bare target took {result['roof']['bare_ms']:.2f} ms for one token, "
        f"{result['roof']['bare_over_roof']:.2f} × what reading its weights takes."
    )


def _conditions(result: dict[str, Any]) -> Iterable[tuple[str, str]]:
    found, memory = result["conditions"], result["memory"]
    machine = found["machine"]
    yield "machine", f"{machine['cpu']['model']}, {counted(machine['cpu']['cores'], 'core')}; {machine['platform']}"
    yield "GPU", ", ".join(machine["gpus"]) or "none"
    yield "memory", in_bytes(machine["memory"]["total_bytes"] or 0)
    used = f"{in_bytes(memory['peak_resident_bytes'])} resident at the peak, libraries included"
    yield "memory used", used + (f", {in_bytes(memory['gpu_bytes'])} on the GPU" if memory["gpu_bytes"] else "")
    yield "versions", _pairs(found["versions"])
    yield "bundle", f"{result['bundle']}, made by {_pairs(found['bundle_made_by'])}"
    yield "target's weights", result["weights"]
    if compared := result["compared"]:
        yield compared["name"], _pairs(compared["runs_as"])
        wrote = (f"K = {one['draft_length']}: {same_text(one)}" for one in compared["settings"])
        yield "which wrote", "; ".join(wrote)
    for one in result["settings"]:
        if one["on_device"]:
            yield f"K = {one['draft_length']}", on_device(one["draft_length"], one).partition(": ")[2]
    yield "prompts", f"{result['prompts']} of {result['prompts_from']}, {result['repeats']} repeats"
    yield "sampling", _pairs(result["sampling"])
    if not result["lossless"]:
        yield "lossy", lossy(result["sampling"]["lenience"])


def _pairs(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields.items())


def _definitions(pairs: Iterable[tuple[str, str]]) -> str:
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(value)}</dd>' for name, value in pairs)}</dl>"


def _optional(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("result", metavar="RESULT.json", type=Path, help="what trt-spec bench --json wrote")
    parser.add_argument("out", metavar="OUT.html", type=Path, help="the page to write")


def run(arguments: argparse.Namespace) -> int:
    require_matplotlib()
    with whole_file(arguments.out) as stream:
        content = read_text(arguments.result, "result")
        try:
            stream.write(report_page(json.loads(content)))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise RequestError(
                f"{arguments.result} is not a result of this version's bench ({type(error).__name__}: {error}); "
                "measure again with trt-spec bench --json"
            ) from error
    return 0


main = program("bench_page", __doc__, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
