"""An interruption ends a measurement, and what whole repeats have measured is kept."""

import pytest
from trt_spec.tools.flags import bench, tune
from trt_spec.tools.measuring.whole_repeats import whole_repeats
from trt_spec.tools.program import Parser


def measured(interrupted_in: int) -> tuple[list[int], int]:
    into: list[int] = []

    def run(repeat: int) -> None:
        into.append(repeat)
        if repeat == interrupted_in:
            raise KeyboardInterrupt
        into.append(repeat)

    return whole_repeats(3, run, into)


def test_what_whole_repeats_have_measured_is_kept(capsys):
    assert measured(interrupted_in=2) == ([0, 0, 1, 1], 2)
    assert capsys.readouterr().err == "interrupted: this is what 2 of 3 repeats have measured\n"
    assert measured(interrupted_in=3) == ([0, 0, 1, 1, 2, 2], 3)
    assert capsys.readouterr().err == ""


def test_before_the_first_has_ended_nothing_is_kept():
    with pytest.raises(KeyboardInterrupt):
        measured(interrupted_in=0)


def settled(flags, *words):
    parser = Parser(prog="x")
    flags.add_arguments(parser)
    arguments = parser.read([*(("--bundle", "b") if flags is bench else ("b",)), *words])
    flags.settle(arguments)
    return arguments


@pytest.mark.parametrize("flags", [bench, tune])
def test_quick_settles_what_was_left_open_and_nothing_else(flags):
    usual, quick = settled(flags), settled(flags, "--quick")
    assert (usual.repeats, usual.draft_lengths) == (3, None)
    assert (quick.repeats, quick.draft_lengths, quick.max_new_tokens) == (1, (0, 2, 4), flags.QUICK_TOKENS)
    own = settled(flags, "--quick", "--draft-lengths", "1,3", "--max-new-tokens", "99", "--repeats", "2")
    assert (own.draft_lengths, own.max_new_tokens, own.repeats) == ((1, 3), 99, 2)


def test_what_is_stated_stays_also_where_it_is_the_usual():
    same = ("--repeats", "3", "--batches", "1,2,4,8", "--max-new-tokens", str(tune.NEW_TOKENS))
    own = settled(tune, "--quick", *same)
    assert (own.repeats, own.batches, own.max_new_tokens) == (3, tune.BATCHES, tune.NEW_TOKENS)
    assert settled(tune, "--quick").batches == tune.QUICK_BATCHES
    assert settled(tune).batches == tune.BATCHES
    assert settled(tune).max_new_tokens == tune.NEW_TOKENS
