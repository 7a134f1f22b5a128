"""Tables, sizes and progress for people to read: drawn by rich on a terminal, plain lines elsewhere.

rich is imported where it draws and nowhere else: loading it takes longer than many a command.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from .interruption import insist

if TYPE_CHECKING:
    from rich.console import Console

DUMB = ("dumb", "unknown")  # terminals that cannot move back to draw again
UNITS = ("B", "KB", "MB", "GB", "TB")

Columns = Mapping[str, tuple[str, str]]  # by title: the key of a value and its format


class Show(Protocol):
    """Is called with the name of each stage as it begins, and with how much of the total it is.

    An interruption that was suppressed before is raised again here.
    """

    def __call__(self, stage: str, parts: int = 1, /) -> None: ...


def table(
    rows: Sequence[Sequence[str]],
    left: int = 1,
    heading: bool = True,
    indent: int = 0,
    console: "Console | None" = None,
) -> str:
    """Align the first `left` columns to the left and the others to the right; the first row may be a heading."""
    console = console or _terminal(sys.stdout)
    lines = _plain_lines(rows, left) if console is None else _drawn_lines(rows, left, heading, indent, console)
    return "\n".join(f"{indent * ' '}{line}".rstrip() for line in lines)


def table_of(rows: Iterable[Mapping[str, Any]], columns: Columns, left: int = 1) -> str:
    """Make a table of JSON objects; a value that is missing or None is shown as a dash."""

    def cell(value: Any, form: str) -> str:
        return "-" if value is None else format(value, form)

    lines = [[cell(row.get(key), form) for key, form in columns.values()] for row in rows]
    return table([list(columns), *lines], left)


def _plain_lines(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells))
    return lines


def _drawn_lines(rows: Sequence[Sequence[str]], left: int, heading: bool, indent: int, console: "Console") -> list[str]:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=SIMPLE_HEAD, show_header=heading, show_edge=False, pad_edge=False)
    for i, title in enumerate(rows[0]):
        drawn.add_column(Text(title), justify="left" if i < left else "right", overflow="fold")
    for row in rows[heading:]:
        drawn.add_row(*map(Text, row))  # as Text, or a name in brackets would be read as markup
    with console.capture() as captured:
        console.print(drawn, width=console.width - indent)
    return captured.get().rstrip("\n").split("\n")


def in_bytes(size: float) -> str:
    """Three digits and a decimal unit."""
    unit = 0
    while size >= 999.5 and unit < len(UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {UNITS[unit]}"


def in_time(seconds: float) -> str:
    """Minutes, or seconds where few are left."""
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{max(5, 5 * round(seconds / 5))} s"


def say(line: str) -> None:
    """Tell the user something on standard error, if it can be written to; standard output is for results."""
    with suppress(OSError):  # a full disk must not end what works
        print(line, file=sys.stderr, flush=True)


@contextmanager
def progress(
    name: str, total: int | None = None, ticking: bool = False, console: "Console | None" = None
) -> Iterator[Show]:
    """Show each stage as it begins: on a terminal in a bar with the time left, elsewhere on a line.

    The time left is an estimate that takes all parts of the total to be equally long. With `ticking` the clock runs:
    the bar is drawn again each second, and a line begins with the seconds so far. Without, nothing runs beside what is
    measured, and a line begins with the share that is done and the time left.
    """
    console = console or _terminal(sys.stderr)
    begun = 0  # the parts of all stages so far
    if console is None:
        began = perf_counter()

        def line(stage: str, parts: int = 1, /) -> None:
            nonlocal begun
            insist()
            seconds = perf_counter() - began
            if ticking:
                stage = f"[{seconds:6.1f} s] {stage}"
            elif total:
                left = f", about {in_time(seconds * max(0, total - begun) / begun)} left" if begun else ""
                stage = f"[{min(1.0, begun / total):4.0%}{left}] {stage}"
            say(stage)
            begun += parts

        yield line
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    with Progress(
        TextColumn(name),
        BarColumn(16),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("so far,"),
        TimeRemainingColumn(),
        TextColumn("left  {task.description}", markup=False, table_column=rest),
        console=console,
        auto_refresh=ticking,
        refresh_per_second=1,
        transient=True,
        expand=True,
        redirect_stdout=False,  # it may be a file while standard error is a terminal
        speed_estimate_period=inf,
    ) as bars:
        task = bars.add_task("", total=total)

        def show(stage: str, parts: int = 1, /) -> None:
            nonlocal begun
            insist()
            longest = None if total is None else max(total, begun + parts)
            bars.update(task, completed=begun, total=longest, description=stage, refresh=True)
            begun += parts

        yield show


def _terminal(stream: TextIO) -> "Console | None":
    """A console that draws on the stream, or None if nothing can be drawn there."""
    if not stream.isatty() or os.environ.get("TERM") in DUMB:
        return None
    from rich.console import Console

    return Console(file=stream)
