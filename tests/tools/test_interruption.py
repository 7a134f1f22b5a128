"""A signal ends a program with its own exit code, wherever it lands and whatever a library makes of it."""

import signal
import sys
import weakref
from contextlib import suppress

import pytest
from trt_spec.engines.bundle.undisturbed import undisturbed
from trt_spec.tools.console import progress
from trt_spec.tools.interruption import TimeUp, ended_after
from trt_spec.tools.measuring.budget import Part, run_parts
from trt_spec.tools.program import exit_code

ENDS = [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]


class Referred:
    """What a weak reference can point to."""


def in_a_callback(number: int) -> None:
    """What it raises Python can only print."""
    referred = Referred()
    kept = weakref.ref(referred, lambda _: signal.raise_signal(number))
    del referred
    assert kept() is None


def into_nothing(number: int) -> None:
    with suppress(BaseException):
        signal.raise_signal(number)


def into_an_error(number: int) -> None:
    try:
        signal.raise_signal(number)
    except BaseException as error:
        raise RuntimeError("a library's own") from error


@pytest.fixture(autouse=True)
def heeding_interrupts():
    """Whoever runs the tests may ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("number", "code", "word"), ENDS)
def test_what_is_suppressed_in_a_callback_comes_again_and_nothing_is_printed_of_it(capfd, number, code, word):
    def run() -> int:
        in_a_callback(number)
        signal.pause()  # until the timer
        return 0

    assert exit_code("program", run) == code
    assert capfd.readouterr() == ("", f"program: {word}\n")


@pytest.mark.parametrize(("number", "code", "word"), ENDS)
def test_what_a_library_suppresses_comes_again_at_the_next_step(capfd, number, code, word):
    steps = []

    def run() -> int:
        with progress("work") as show:
            show("first")
            into_nothing(number)
            steps.append(1)
            show("second")
            steps.append(2)
        return 0

    assert exit_code("program", run, lambda: "; nothing was left") == code
    assert steps == [1]
    assert capfd.readouterr() == ("", f"first\nprogram: {word}; nothing was left\n")


@pytest.mark.parametrize("suppressed", [in_a_callback, into_nothing])
def test_what_is_suppressed_within_a_budget_is_no_end_of_the_time(capfd, suppressed):
    """Both need the one timer of the process."""
    seen = []

    def suppressing():
        suppressed(signal.SIGINT)
        if suppressed is in_a_callback:
            signal.pause()  # until the timer
        yield {}

    def run() -> int:
        parts = [Part("suppressing", 0.0, suppressing), Part("next", 0.0, lambda: iter([{}]))]
        seen.extend(run_parts(parts, 60.0, lambda part, row: None, lambda: None))
        return 0

    assert exit_code("program", run) == 130
    assert [done for _, done in seen if done.left_out or done.failed] == []
    assert "next" not in [part.name for part, _ in seen]
    assert capfd.readouterr() == ("", "program: interrupted\n")


def test_a_time_ends_where_no_signal_has_come():
    with pytest.raises(TimeUp), ended_after(0.01):
        signal.pause()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_what_is_suppressed_in_a_callback_waits_for_what_belongs_together():
    done = []

    def run() -> int:
        in_a_callback(signal.SIGINT)
        with undisturbed():
            signal.pause()
            done.append("first")
            done.append("second")
        return 0

    assert exit_code("program", run) == 130
    assert done == ["first", "second"]


@pytest.mark.parametrize("suppressed", [into_nothing, into_an_error])
@pytest.mark.parametrize(("number", "code", "word"), ENDS)
def test_what_a_library_makes_of_a_signal_is_an_interruption_all_the_same(capfd, number, code, word, suppressed):
    def run() -> int:
        suppressed(number)
        return 0

    assert exit_code("program", run) == code
    assert capfd.readouterr() == ("", f"program: {word}\n")


def test_another_error_in_a_callback_is_told_as_ever(monkeypatch):
    told = []
    monkeypatch.setattr("sys.unraisablehook", lambda one: told.append(one.exc_type))

    def run() -> int:
        referred = Referred()
        kept = weakref.ref(referred, lambda _: 1 / 0)
        del referred
        assert kept() is None
        return 0

    assert exit_code("program", run) == 0
    assert told == [ZeroDivisionError]


def test_a_program_gives_back_what_it_found_of_signals():
    def now():
        return [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)], sys.unraisablehook

    before = now()
    assert exit_code("program", lambda: 0) == 0
    assert exit_code("program", lambda: in_a_callback(signal.SIGINT) or 0) == 130
    assert now() == before


def test_a_program_in_the_background_goes_on_ignoring_interrupts():
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def run() -> int:
        signal.raise_signal(signal.SIGINT)
        return 0

    assert exit_code("program", run) == 0
