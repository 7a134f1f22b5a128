"""Charts by matplotlib: as figures, as pictures in files, and as SVG that takes its colours from the page."""

import io
import re
import textwrap
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from ..theory.lines import speed_up

COLOURS = {  # on white; a page may give other values to the names
    "ink": "#1f2429",
    "muted": "#59636f",
    "line": "#d3d9e1",
    "blue": "#0b62c5",
    "orange": "#b4530a",
    "violet": "#7a3fb1",
    "green": "#1a7f38",
    "grey": "#8a939e",
}
PART_COLOURS = {"draft": "green", "verify": "blue", "accept": "orange", "host": "grey"}  # of the parts of a round
SIZE = (5.0, 3.1)  # inches: about a telephone's width at full size
TEXT = 11
MOST_LABELS = 9  # above bars, before they touch
ROUND = "K, tokens proposed in a round\n(K proposals, then one pass of the target over them)"
TITLE_WIDTH, TITLE_LINE = 66, 0.18  # characters a panel, inches
ALPHA_STEP = 0.1
FREE_DRAFT = 0.05  # drawn beside a draft that costs nothing


def speed_over_draft_length(result: dict[str, Any]) -> Any:
    """Tokens per second: measured, with every repeat; as predicted; and in another runtime if one took turns."""
    figure, (axes,) = _figure(ROUND, "tokens per second")
    settings = result["settings"]
    lengths = [one["draft_length"] for one in settings]
    plain = settings[0]["tokens_per_second"]
    _rates(axes, settings, "measured", "blue", "o")
    if all(one["predicted"] is not None for one in settings):
        expected = [one["predicted"] * plain for one in settings]
        axes.plot(lengths, expected, "--", color=COLOURS["orange"], label="predicted")
    if compared := result["compared"]:
        _rates(axes, compared["settings"], compared["name"], "violet", "s")
    axes.set_xticks(lengths)
    axes.set_ylim(bottom=0)
    _legend(axes)
    return figure


def bandwidth_over_draft_length(result: dict[str, Any]) -> Any:
    """The share of the memory's bandwidth that rounds reach."""
    figure, (axes,) = _figure(ROUND, "share of the bandwidth")
    settings = result["settings"]
    shares = [100 * one["bandwidth_share"] for one in settings]
    lengths = [one["draft_length"] for one in settings]
    axes.plot(lengths, shares, "o-", color=COLOURS["blue"])
    axes.set_xticks(lengths)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:.0f}%")
    return figure


def accepted_histogram(setting: dict[str, Any]) -> Any:
    """The share of rounds that accepted 0, 1, … K of their proposals."""
    counts = setting["speculation"]["histogram"]
    figure, (axes,) = _figure("proposals accepted in a round", "rounds")
    shares = [count / sum(counts) for count in counts]
    bars = axes.bar(range(len(counts)), [100 * share for share in shares], color=COLOURS["blue"], width=0.7)
    if len(counts) <= MOST_LABELS:
        axes.bar_label(bars, [f"{share:.0%}" for share in shares], padding=2, fontsize=TEXT - 1, color=COLOURS["ink"])
    axes.set_xticks(range(len(counts)))
    axes.yaxis.set_major_formatter("{x:.0f}%")
    axes.margins(y=0.12)
    return figure


def acceptance_by_position(setting: dict[str, Any]) -> Any:
    """The share of examined proposals that were accepted at each position, beside α, the share of all."""
    figure, (axes,) = _figure("position in the proposal, 1 to K", "accepted of examined")
    shares = setting["speculation"]["acceptance_by_position"]
    seen = [(position, share) for position, share in enumerate(shares, 1) if share is not None]
    axes.plot(*zip(*seen, strict=True), "o-", color=COLOURS["blue"], label="accepted")
    alpha = setting["acceptance"]
    axes.axhline(alpha, linestyle="--", color=COLOURS["orange"], label=f"α = {alpha:.2f}")
    axes.set_xticks(range(1, len(shares) + 1))
    axes.set_ylim(0, 1.04)
    _legend(axes)
    return figure


def round_timeline(plain: dict[str, Any], setting: dict[str, Any]) -> Any:
    """The parts of a round, from left to right: without a draft, with K proposals, and the bare engine runs of that."""
    figure, (axes,) = _figure("milliseconds of one round", "", grid="x")
    bare = {"draft": setting["draft_ms"], "verify": setting["verify_ms"]}
    rows = {"bare runs": bare, f"K = {setting['draft_length']}": setting["parts_ms"], "K = 0": plain["parts_ms"]}
    begun = [0.0] * len(rows)
    for part in PART_COLOURS:
        widths = [row.get(part, 0.0) for row in rows.values()]
        axes.barh(list(rows), widths, left=begun, height=0.55, color=COLOURS[PART_COLOURS[part]], label=part)
        begun = [left + width for left, width in zip(begun, widths, strict=True)]
    axes.set_xlim(0, 1.03 * max(begun))
    _legend(axes)
    return figure


def planned_speed_up(found: dict[str, Any]) -> Any:
    """Speed-up over K as calculated: on the left for several acceptances, on the right for several costs."""
    alpha, cost, v = found["alpha"], found["cost"], found["verify_cost"]
    lengths = [one["draft_length"] for one in found["settings"]]
    figure, (left, right) = _figure(ROUND, "speed-up over no draft", panels=2)
    alphas = sorted({max(0.0, alpha - ALPHA_STEP), alpha, min(1.0, alpha + ALPHA_STEP)}, reverse=True)
    costs = [cost / 2, cost, cost * 2] if cost else [0.0, FREE_DRAFT, 2 * FREE_DRAFT]
    for axes, curves in (
        (left, [(f"α = {a:.3g}", a, cost) for a in alphas]),
        (right, [(f"c = {c:.3g}", alpha, c) for c in costs]),
    ):
        others = iter((("green", ":"), ("orange", "--")))
        for label, a, c in curves:
            given = (a, c) == (alpha, cost)
            colour, style = ("blue", "-") if given else next(others)
            speeds = [speed_up(a, k, c, v) for k in lengths]
            axes.plot(lengths, speeds, style, color=COLOURS[colour], linewidth=2.4 if given else 1.6, label=label)
    for axes in (left, right):
        axes.axhline(1, color=COLOURS["muted"], linewidth=0.8)
        axes.set_ylim(bottom=0)
        axes.xaxis.get_major_locator().set_params(integer=True)
        _legend(axes)
    return figure


def waits_under_load(found: dict[str, Any]) -> Any:
    """The waits of each client, by when it came: for its first token and for each later one, on one scale."""
    figure, (axes,) = _figure("seconds since the load began", "milliseconds")
    arrived, first, later = zip(*found["each"], strict=True)
    axes.scatter(arrived, first, s=14, color=COLOURS["blue"], label="to the first token")
    axes.scatter(arrived, later, s=14, marker="x", color=COLOURS["orange"], label="for each later token")
    axes.set_yscale("log")
    _legend(axes)
    return figure


def save(figure: Any, title: Sequence[str], path: Path, out: TextIO) -> None:
    """Write a picture on white, under its title, in the format that the name of the file asks for."""
    width = TITLE_WIDTH * len(figure.axes)
    lines = [part for line in title for part in textwrap.wrap(line.encode(errors="replace").decode(), width)]
    style = {"ha": "left", "fontsize": TEXT - 2, "color": COLOURS["ink"], "linespacing": 1.35, "parse_math": False}
    figure.suptitle("\n".join(lines), x=0.02, **style)
    figure.set_figheight(figure.get_figheight() + TITLE_LINE * len(lines))
    if path.suffix == ".svg":
        out.write(_svg(figure, facecolor="white"))
    else:
        figure.savefig(out.buffer, format="png", dpi=200, facecolor="white", metadata={"Software": None})


def inline_svg(figure: Any, name: str, label: str) -> str:
    """An <svg> element for a page that defines the colours (--ink and so on); its ids begin with `name`."""
    text = _svg(figure, facecolor="none")
    text = text[text.index("<svg") :]
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    text = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{name}-", text)
    for colour, value in COLOURS.items():
        text = text.replace(value, f"var(--{colour})")
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def _svg(figure: Any, facecolor: str) -> str:
    """The same figure always gives the same SVG, and its words stay text."""
    out = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with import_module("matplotlib").rc_context({"svg.fonttype": "none", "svg.hashsalt": "trt-spec"}):
        figure.savefig(out, format="svg", facecolor=facecolor, metadata=nothing)
    return out.getvalue()


def _figure(x: str, y: str, panels: int = 1, grid: str = "y") -> tuple[Any, Sequence[Any]]:
    width, height = SIZE
    figure = import_module("matplotlib.figure").Figure((width * (1 + 0.7 * (panels - 1)), height), layout="constrained")
    all_axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    for axes in all_axes:
        axes.set_facecolor("none")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(COLOURS["line"])
        axes.tick_params(colors=COLOURS["ink"], labelsize=TEXT, length=0, pad=5)
        axes.grid(axis=grid, color=COLOURS["line"], linewidth=0.8)
        axes.set_axisbelow(True)
    label = all_axes[0].set_xlabel if panels == 1 else figure.supxlabel
    label(x, color=COLOURS["muted"], fontsize=TEXT)
    all_axes[0].set_ylabel(y, color=COLOURS["muted"], fontsize=TEXT)
    return figure, all_axes


def _rates(axes: Any, settings: Sequence[dict[str, Any]], label: str, colour: str, marker: str) -> None:
    lengths, rates = ([one[name] for one in settings] for name in ("draft_length", "tokens_per_second"))
    each = [one["tokens_per_second_each"] for one in settings]
    axes.vlines(lengths, list(map(min, each)), list(map(max, each)), color=COLOURS[colour], linewidth=1.2)
    repeats = [(length, rate) for length, some in zip(lengths, each, strict=True) for rate in some]
    axes.scatter(*zip(*repeats, strict=True), s=70, marker="_", color=COLOURS[colour], linewidths=1.2)
    axes.plot(lengths, rates, f"{marker}-", color=COLOURS[colour], markersize=4, linewidth=1.2, label=label)


def _legend(axes: Any) -> None:
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=4,
        frameon=False,
        fontsize=TEXT,
        labelcolor=COLOURS["ink"],
        handlelength=1.6,
        columnspacing=1.4,
        borderaxespad=0.2,
    )
