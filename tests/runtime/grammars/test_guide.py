"""A guide says at every place what a matcher fed with just that prefix says, wherever it has been before."""

import random

import numpy as np
import pytest
from trt_spec.runtime import Grammar, SamplingParams
from trt_spec.runtime.grammars import guide as guide_module
from trt_spec.runtime.grammars.compiler import Compiler
from trt_spec.runtime.grammars.guide import ANYTHING, GUIDES, Guide

A, B, C, D, EOS = 2, 3, 4, 5, 1
GRAMMARS = {
    "regex": Grammar.regex("(ab|cd)*e{1,3}"),
    "lark": Grammar.lark('start: "(" start ")" | "a" | start "+" start'),
    "schema": Grammar.json_schema('{"type": "array", "items": {"enum": [1, 20, 3]}, "maxItems": 3}'),
    "choice": Grammar.choice(["abba", "abc", "d"]),
}


def guide_of(compiler: Compiler, grammar: Grammar, **fields: object) -> Guide:
    guide = compiler.guide(SamplingParams(grammar=grammar, **fields))
    assert guide is not None
    return guide


def tokens_of(bits: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize("name", GRAMMARS)
def test_what_may_follow_depends_on_the_prefix_alone(compiler: Compiler, name: str) -> None:
    """Random proposals, legal and not, are walked, left and committed; each answer equals a fresh guide's."""
    dice, grammar = random.Random(name), GRAMMARS[name]
    ends = compiler._bundle.tokenizer.eos_token_ids
    for _ in range(8):
        guide, committed = guide_of(compiler, grammar), []
        for _ in range(12):
            ahead: list[int] = []
            for _ in range(dice.randint(0, 6)):
                allowed = tokens_of(guide.allowed(ahead, 1)[0])
                ahead.append(dice.randrange(4096) if dice.random() < 0.1 else dice.choice(sorted(allowed)))
            found = guide.allowed(ahead, len(ahead) + 1).copy()
            broken = False
            for place in range(len(ahead) + 1):
                fresh = guide_of(compiler, grammar)
                assert fresh.follow(committed) == len(committed)
                [expected] = fresh.allowed(ahead[:place], 1)
                assert (found[place] == (ANYTHING if broken else expected)).all()
                if place < len(ahead):
                    broken = broken or ahead[place] in ends or ahead[place] not in tokens_of(expected)
            stand = dice.randint(0, len(ahead))
            lawful = [place for place in range(stand) if ahead[place] in tokens_of(found[place])]
            kept = ahead[: next((i for i in range(stand) if i not in lawful or ahead[i] in ends), stand)]
            committed += kept
            assert guide.follow(kept) == len(kept)
            assert not guide.error


def test_when_the_text_is_complete_only_what_ends_it_may_follow(letters: Compiler) -> None:
    guide = guide_of(letters, Grammar.regex("ab?"), stop_token_ids=[9])
    assert tokens_of(guide.allowed([], 1)[0]) == {A}
    assert tokens_of(guide.allowed([A], 1)[0]) == {B, EOS, 9}
    assert tokens_of(guide.allowed([A, B], 1)[0]) == {EOS, 9}


def test_past_what_ends_or_breaks_the_text_everything_is_allowed(letters: Compiler) -> None:
    guide = guide_of(letters, Grammar.regex("ab"))
    for ahead in ([A, B, EOS, A], [A, D, A, A], [A, 10**6, 0, 0], [A, -1, 0, 0]):
        found = guide.allowed(ahead, 5)
        assert tokens_of(found[1]) == {B}
        assert (found[3:] == ANYTHING).all()
    assert guide.follow([A, B, EOS, D]) == 4, "what follows the end was never said"
    assert not guide.error


def test_a_committed_token_that_breaks_the_grammar_is_refused_and_those_after_it(letters: Compiler) -> None:
    guide = guide_of(letters, Grammar.regex("abcd"))
    assert guide.follow([A, B, D, D]) == 2
    assert guide.error == f"token {D} breaks it"


def test_a_place_where_all_is_banned_is_dead_and_none_is_where_something_is_left(letters: Compiler) -> None:
    guide = guide_of(letters, Grammar.regex("a[bc]d"), logit_bias={B: -np.inf, D: -np.inf})
    assert tokens_of(guide.allowed([A], 1)[0]) == {B, C}, "the bias itself is another filter's"
    assert (guide.allowed([A, C], 1) == ANYTHING).all(), "so that no probability is 0 / 0"
    assert guide.follow([A, C]) == 2
    assert guide.follow([D]) == 0
    assert guide.error == "logit_bias bans all that it allows there"


def test_a_limit_met_in_proposals_that_are_rejected_leaves_no_trace(letters: Compiler) -> None:
    """The vocabulary has no ñ, so that the matcher ends in an error after b, and an error lasts."""
    guide = guide_of(letters, Grammar.regex("a(bñ|cd)"))
    fresh = guide_of(letters, Grammar.regex("a(bñ|cd)"))
    assert (guide.allowed([A, B], 1) == ANYTHING).all()
    assert guide._matcher.is_error()
    assert guide.follow([A, C]) == 2
    assert fresh.follow([A, C]) == 2
    assert (guide.allowed([], 1) == fresh.allowed([], 1)).all()
    assert tokens_of(guide.allowed([], 1)[0]) == {D}
    dead = guide_of(letters, Grammar.regex("a(bñ|cd)"))
    assert dead.follow([A, B]) == 2
    assert dead.follow([C]) == 0
    assert dead.error.startswith("nothing can follow: ")


def test_guides_that_nobody_holds_are_forgotten(letters: Compiler) -> None:
    number = guide_of(letters, Grammar.regex("a")).number
    assert number not in GUIDES


AMBIGUOUS = Grammar.lark("start: e\ne: e e | e e e | /./ | /../ | /.../")  # each token takes longer than the last


def test_a_grammar_that_takes_too_long_at_each_token_ends_its_request(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guide_module, "MOST_SECONDS", 0.05)
    monkeypatch.setattr(guide_module, "SECONDS_A_TOKEN", 0)
    guide, dice = guide_of(compiler, AMBIGUOUS), random.Random(0)
    for _ in range(400):
        token = dice.choice(sorted(tokens_of(guide.allowed([], 1)[0]) - {EOS}))
        if not guide.follow([token]):
            break
    assert guide.error == "to find what may follow takes too long"
    assert guide.seconds < 2


def test_a_healthy_grammar_has_all_the_time_that_it_needs(compiler: Compiler) -> None:
    guide, dice = guide_of(compiler, Grammar.json_schema('{"type": "array", "minItems": 500}')), random.Random(0)
    for _ in range(400):
        allowed = sorted(tokens_of(guide.allowed([], 1)[0]))
        assert guide.follow([dice.choice(allowed)]) == 1
    assert guide.seconds < guide_module.MOST_SECONDS
