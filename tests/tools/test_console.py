"""On a terminal tables and progress are drawn, elsewhere they are plain lines without a single escape."""

import io
import subprocess
import sys

import pytest
from rich.console import Console
from trt_spec.tools.console import in_bytes, progress, table

from ..kit.terminal import Terminal

ROWS = [("drafter", "K", "tokens/s"), ("model", "4", "159.6"), ("[red]lookup[/]", "16", "7.0")]
PLAIN = "drafter          K  tokens/s\nmodel            4     159.6\n[red]lookup[/]  16       7.0"


@pytest.fixture
def terminal(monkeypatch):
    """A Console that draws as on a terminal of 100 columns, into a string."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Console(force_terminal=True, color_system="standard", file=io.StringIO(), width=100)


def drawn(console):
    return console.file.getvalue()


def test_what_is_no_terminal_gets_plain_columns():
    assert table(ROWS) == PLAIN
    assert table(ROWS, left=2).splitlines()[1] == "model           4      159.6"


def test_a_terminal_gets_a_heading_and_every_cell_as_it_is(terminal):
    lines = table(ROWS, console=terminal).splitlines()
    assert "\x1b[1m" in lines[0], "the heading is bold"
    assert "[red]lookup[/]" in lines[-1], "a name in brackets is no markup"
    assert lines[-1].rstrip().endswith("7.0")
    assert len(lines) == 4
    assert len(table(ROWS, heading=False, console=terminal).splitlines()) == 3


def test_a_narrow_terminal_folds_long_cells_and_loses_nothing():
    narrow = Console(force_terminal=True, color_system=None, file=io.StringIO(), width=40)
    reason = "a reason that is much longer than forty columns"
    shown = table([("name", "refused"), ("some family", reason)], left=2, indent=3, console=narrow)
    words = [word for line in shown.splitlines()[2:] for word in line.split()]
    assert all(line.startswith("   ") for line in shown.splitlines())
    assert sorted(words) == sorted(["some", "family", *reason.split()])
    assert max(map(len, shown.splitlines())) <= 40


def test_no_color_leaves_no_colour_in_what_is_drawn(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    console = Console(force_terminal=True, color_system="standard", file=io.StringIO(), width=100)
    with progress("bench", total=2, console=console) as show:
        show("one")
    assert "one" in drawn(console)
    assert not any(f"\x1b[{colour}" in drawn(console) + table(ROWS, console=console) for colour in ("3", "9", "4"))


def test_a_plain_stream_gets_one_line_a_stage(capsys):
    with progress("bench") as show:
        show("warming up")
        show("repeat 1 of 2")
    assert capsys.readouterr() == ("", "warming up\nrepeat 1 of 2\n")


def test_where_the_total_is_known_a_line_says_how_much_is_done_and_how_long_the_rest_takes(capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr("trt_spec.tools.console.perf_counter", lambda: now)
    with progress("bench", total=14) as show:
        for stage, parts in (("warming up", 1), ("warming up more", 1), ("repeat 1", 6), ("repeat 2", 6), ("more", 6)):
            show(stage, parts)
            now += 10 * parts
    assert capsys.readouterr().err.splitlines() == [
        "[  0%] warming up",
        "[  7%, about 2 min left] warming up more",
        "[ 14%, about 2 min left] repeat 1",
        "[ 57%, about 60 s left] repeat 2",
        "[100%, about 5 s left] more",
    ]


def test_a_ticking_stage_says_when_it_began(capsys):
    with progress("export", ticking=True) as show:
        show("tracing")
    assert capsys.readouterr().err == "[   0.0 s] tracing\n"


def test_a_terminal_gets_a_bar_with_the_time_left_which_is_gone_at_the_end():
    now = 0.0
    terminal = Console(force_terminal=True, color_system=None, file=io.StringIO(), width=100)
    terminal.get_time = lambda: now
    with progress("bench", total=4, console=terminal) as show:
        for stage in ("first [red]stage", "second", "third"):
            show(stage)
            now += 10
        seen = drawn(terminal)
    assert "first [red]stage" in seen
    last = seen.rpartition("bench")[2]
    assert "2/4 0:00:20 so far, 0:00:20 left" in last, "two of four stages are left, of ten seconds each"
    assert "third" in last
    assert drawn(terminal).endswith("\x1b[2K"), "the line is cleared for the result"


def test_more_stages_than_were_expected_do_no_harm(terminal):
    with progress("export", total=1, console=terminal) as show:
        for stage in ("one", "two", "three"):
            show(stage)
    assert "2/3" in drawn(terminal)


def test_a_long_stage_counts_for_as_many_parts_as_it_has(terminal):
    with progress("bench", total=7, console=terminal) as show:
        show("warming up")
        show("repeat 1 of 1", 6)
        assert "1/7" in drawn(terminal)
        show("one more", 2)
    assert "7/9" in drawn(terminal)


def test_a_long_stage_never_takes_the_place_of_the_numbers():
    narrow = Console(force_terminal=True, color_system=None, file=io.StringIO(), width=80)
    with progress("tune", total=2, console=narrow) as show:
        show("a stage of many words " * 10)
    assert "0/2 0:00:00 so far, -:--:-- left  a stage" in drawn(narrow)


@pytest.mark.parametrize("ticking", [False, True])
def test_nothing_runs_beside_what_is_measured(terminal, ticking, monkeypatch):
    begun = []
    monkeypatch.setattr("threading.Thread.start", lambda self: begun.append(self))
    monkeypatch.setattr("threading.Thread.join", lambda self, timeout=None: None)
    with progress("bench", ticking=ticking, console=terminal) as show:
        show("one")
    assert len(begun) == ticking


@pytest.mark.parametrize(("kind", "bar"), [("xterm", True), ("dumb", False)])
def test_a_terminal_that_cannot_redraw_gets_lines(monkeypatch, kind, bar):
    monkeypatch.setenv("TERM", kind)
    monkeypatch.setattr("sys.stderr", Terminal())
    with progress("bench") as show:
        show("one")
    assert ("\x1b" in sys.stderr.getvalue()) is bar
    assert (sys.stderr.getvalue() == "one\n") is not bar


def test_results_never_leave_standard_output_while_progress_is_drawn(capsys, terminal):
    with progress("bench", console=terminal) as show:
        show("one")
        print("a result")
    assert capsys.readouterr().out == "a result\n"


def test_nothing_is_loaded_to_draw_what_is_plain():
    code = (
        "import sys; from trt_spec.tools.console import progress, table\n"
        "with progress('x') as show: show('one')\n"
        "print(table([('a', 'b')])); sys.exit('rich' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "a  b\n", "one\n")


@pytest.mark.parametrize(
    ("size", "text"),
    [(12, "12 B"), (999.7, "1 KB"), (6_100, "6.1 KB"), (62_940_672, "62.9 MB"), (5_993_930_752, "5.99 GB")],
)
def test_sizes_read_as_people_say_them(size, text):
    assert in_bytes(size) == text
