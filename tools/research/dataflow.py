"""Draws how data flows, from checkpoints through a bundle to text, as an SVG for light and dark pages.

python -m trt_spec.tools.research.dataflow
"""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from ..pages.charts import COLOURS
from ..pages.page import DARK

FILE = Path(__file__).with_suffix(".svg")
WIDTH, HEIGHT = 760, 520
LIGHT_PAPER, DARK_PAPER = {"paper": "#ffffff", "card": "#f5f7f9"}, {"paper": "#14181d", "card": "#1d232a"}
LINE_HEIGHT = 20
ABOVE_LINE = 5  # from the middle of a line of text down to its baseline
STYLE = """text { font-family: system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 15px; }
.code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 13px; }
.small { font-size: 13px; }
.title { font-weight: 600; }
.middle { text-anchor: middle; }
.end { text-anchor: end; }
.box { stroke-width: 1.5; }
.arrow { fill: none; stroke-width: 1.5; marker-end: url(#tip); }"""
LABEL = "Checkpoints become a bundle, once. Rounds over the bundle turn requests into text."
BUNDLE = (
    ("target/ draft/", "ONNX graphs and weights"),
    ("tokenizer.json", "the target's tokenizer"),
    ("manifest.json", "contracts and checksums"),
    ("plans/", "for TensorRT, if built"),
)
ROUND = (  # the colours are those of a round's parts in charts
    ("green", ("draft", "proposes K tokens,", "drawn from its q")),
    ("blue", ("target", "scores all of them", "in one pass: p")),
    ("orange", ("exact test", "keeps a prefix and", "adds one token")),
    ("grey", ("commit", "advances lengths,", "erases nothing")),
)


def main() -> None:
    FILE.write_text(draw(), encoding="utf-8")
    print(FILE)


def draw() -> str:
    """Return the picture as SVG text, always the same."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img" aria-label="{escape(LABEL)}">',
        f"<style>\n{STYLE}\n{colours(COLOURS | LIGHT_PAPER)}",
        f"@media (prefers-color-scheme: dark) {{\n{colours(DARK | DARK_PAPER)}\n}}\n</style>",
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M 0 1 L 10 5 L 0 9 z" class="fill-muted"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" class="fill-paper"/>',
        *building(),
        *running(),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def colours(named: dict[str, str]) -> str:
    """Return rules that fill or stroke with a colour by its name, and draw text in ink where nothing else is said."""
    rules = [
        f".fill-{name} {{ fill: {value}; }} .stroke-{name} {{ stroke: {value}; }}" for name, value in named.items()
    ]
    return "\n".join([f"text {{ fill: {named['ink']}; }}", *rules])


def building() -> Iterable[str]:
    yield text(24, 34, "Once: export", "title")
    yield box(24, 86, 190, 66, "muted")
    yield from column(119, 109, ("checkpoints", "target and draft"))
    yield arrow(214, 119, 344, 119)
    yield text(277, 106, "export-models", "code middle")
    yield text(277, 139, "checks itself", "small middle fill-muted")
    yield box(346, 50, 390, 142, "violet")
    yield text(364, 75, "bundle", "title")
    for line, (name, what) in enumerate(BUNDLE):
        middle = 102 + 24 * line
        yield text(364, middle, name, "code")
        yield text(512, middle, what, "small fill-muted")


def running() -> Iterable[str]:
    yield text(24, 226, "In your service: rounds", "title")
    yield arrow(541, 192, 541, 258)
    yield text(530, 226, "an engine runs its graphs", "small end fill-muted")
    yield box(24, 260, 712, 176, "line", fill="card")
    for place, (colour, lines) in enumerate(ROUND):
        left = 42 + 176 * place
        yield box(left, 282, 148, 88, colour)
        yield from column(left + 74, 306, lines, "small")
        if place:
            yield arrow(left - 28, 326, left - 2, 326)
    yield '<path d="M 644 370 V 392 Q 644 402 634 402 H 126 Q 116 402 116 392 V 372" class="arrow stroke-muted"/>'
    yield text(380, 420, "the next round, for all live requests together", "small middle fill-muted")
    yield arrow(116, 474, 116, 438)
    yield text(116, 494, "requests", "title middle")
    yield arrow(644, 436, 644, 472)
    yield text(644, 494, "text", "title middle")
    yield text(380, 494, "they join and leave between rounds", "small middle fill-muted")


def box(x: int, y: int, width: int, height: int, colour: str, fill: str = "paper") -> str:
    size = f'x="{x}" y="{y}" width="{width}" height="{height}" rx="8"'
    return f'<rect {size} class="box fill-{fill} stroke-{colour}"/>'


def column(x: int, y: int, lines: Sequence[str], rest: str = "small") -> Iterable[str]:
    """Write lines below each other around x, the first of them as a title."""
    for number, line in enumerate(lines):
        yield text(x, y + LINE_HEIGHT * number, line, f"{rest if number else 'title'} middle")


def arrow(x: int, y: int, to_x: int, to_y: int) -> str:
    return f'<path d="M {x} {y} L {to_x} {to_y}" class="arrow stroke-muted"/>'


def text(x: int, y: int, words: str, kind: str) -> str:
    return f'<text x="{x}" y="{y + ABOVE_LINE}" class="{kind}">{escape(words)}</text>'


if __name__ == "__main__":
    main()
