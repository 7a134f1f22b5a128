import io
from dataclasses import replace

import pytest
from trt_spec.runtime import TracedRound, TracedSibling
from trt_spec.tools.trace_lines import Marks, shown

TEXTS = {1: " self", 2: ".x", 3: "\n", 4: "\x1b[31m", 5: "\ufffd", 6: "\u202e", 7: "é"}
REJECTED = TracedRound((1, 2, 3), accepted=1, next_token=7, p=(0.5, 0.25, 0.1), q=(0.75, 1.0, 0.2), next_p=0.625)


class Vocabulary:
    def decode(self, ids, skip_special_tokens):
        assert not skip_special_tokens
        return TEXTS[ids[0]]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_marks_tell_accepted_rejected_and_next_token_apart():
    line = Marks(coloured=False).line(12, REJECTED, Vocabulary())
    assert line == "  12  +' self' 0.50/0.75  -'.x' 0.25/1.00  ='é' 0.62"


def test_colours_are_green_red_and_blue():
    line = Marks(coloured=True).line(1, REJECTED, Vocabulary())
    assert "\x1b[32m' self'\x1b[0m 0.50/0.75" in line
    assert "\x1b[31m'.x'\x1b[0m 0.25/1.00" in line
    assert "\x1b[34m'é'\x1b[0m 0.62" in line


def test_a_fully_accepted_round_has_no_rejected_token():
    accepted = TracedRound((1, 2), accepted=2, next_token=3, p=(0.5, 0.5), q=(0.5, 0.5), next_p=1.0)
    assert Marks(False).line(1, accepted, Vocabulary()) == "   1  +' self' 0.50/0.50  +'.x' 0.50/0.50  ='\\n' 1.00"


def test_a_text_that_ends_inside_the_proposals_has_neither_rejected_nor_next_token():
    ended = TracedRound((1, 2, 3), accepted=1, next_token=None, p=(0.5, 0.5, 0.5), q=(0.5, 0.5, 0.5), next_p=1.0)
    assert Marks(False).line(1, ended, Vocabulary()) == "   1  +' self' 0.50/0.50"


def test_siblings_stand_behind_the_token_that_they_replace():
    def traced(accepted: int, stands: bool) -> TracedRound:
        beside = [TracedSibling(1, 7, 0.3, 0.2, stands), TracedSibling(1, 6, 0.1, 0.05, False)]
        others = [TracedSibling(0, 4, 0.1, 0.1, False)]
        return TracedRound((1, 2, 3), accepted, 3, (0.5,) * 3, (0.5,) * 3, 0.75, (), (*others, *beside))

    plain = Marks(False)
    assert traced(2, True).standing == (1, 7)
    assert plain.line(1, traced(2, True), Vocabulary()) == (
        "   1  +' self' 0.50/0.50  -'.x' 0.50/0.50  +'é' 0.30/0.20  ='\\n' 0.75"
    )
    assert traced(1, False).standing == (1,)
    assert plain.line(1, traced(1, False), Vocabulary()) == (
        "   1  +' self' 0.50/0.50  -'.x' 0.50/0.50  -'é' 0.30/0.20  -'\\u202e' 0.10/0.05  ='\\n' 0.75"
    )
    cut = replace(traced(2, True), accepted=1, next_token=None)
    assert cut.standing == (1,), "the text ended before the sibling"


def test_branches_are_shown_as_far_as_they_were_tested():
    """The line falls at once; of its second sibling the second child stands, which has none."""
    branches = (
        TracedSibling(0, 2, 0.1, 0.2, False),
        TracedSibling(0, 3, 0.3, 0.4, True),
        TracedSibling(1, 1, 0.9, 0.9, False, after=0),
        TracedSibling(1, 2, 0.5, 0.6, False, after=1),
        TracedSibling(1, 4, 0.7, 0.8, True, after=1),
    )
    tree = TracedRound((1, 2), 2, 1, (0.5,) * 2, (0.25,) * 2, 0.75, siblings=branches)
    assert tree.standing == (3, 4)
    assert Marks(False).line(1, tree, Vocabulary()) == (
        r"   1  -' self' 0.50/0.25  -'.x' 0.10/0.20  +'\n' 0.30/0.40  -'.x' 0.50/0.60  +'\x1b[31m' 0.70/0.80  "
        "=' self' 0.75"
    )


def test_a_line_that_goes_on_where_the_first_one_ends_comes_behind_it():
    beside = (TracedSibling(1, 6, 0.1, 1.0, False), TracedSibling(2, 4, 0.3, 1.0, True))
    several = TracedRound((1, 2), 3, 7, (0.5,) * 2, (0.25,) * 2, 0.75, siblings=beside)
    assert several.standing == (1, 2, 4)
    assert Marks(False).line(1, several, Vocabulary()) == (
        r"   1  +' self' 0.50/0.25  +'.x' 0.50/0.25  +'\x1b[31m' 0.30/1.00  ='é' 0.75"
    )


def test_a_round_without_proposals_is_its_next_token():
    plain = TracedRound((), accepted=0, next_token=2, p=(), q=(), next_p=0.5)
    assert Marks(False).line(1, plain, Vocabulary()) == "   1  ='.x' 0.50"


def test_control_characters_never_reach_the_terminal():
    assert shown(3, Vocabulary()) == r"'\n'"
    assert shown(4, Vocabulary()) == r"'\x1b[31m'"
    assert shown(6, Vocabulary()) == r"'\u202e'"


def test_a_token_that_is_part_of_a_character_is_shown_by_its_number():
    assert shown(5, Vocabulary()) == "<5>"


@pytest.mark.parametrize(("no_color", "coloured"), [(None, True), ("", True), ("1", False)])
def test_no_color_turns_colours_off(monkeypatch, no_color, coloured):
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    assert Marks.suited_to(Terminal()).coloured is coloured


def test_what_is_no_terminal_gets_plain_marks(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert not Marks.suited_to(io.StringIO()).coloured
    assert Marks(False).legend().startswith("+accepted   -rejected   =the target's own")
