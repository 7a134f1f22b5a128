"""What lenience does to combs, trees and several lines, enumerated by the code that runs: all tokens, all verdicts."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from trt_spec.runtime import SamplingParams
from trt_spec.runtime.acceptance import combs, lines

from . import test_branches, test_combs, test_lines
from .laws import EXACT, Law, Models, excess, random_models

LENIENCE = 0.5
SAMPLED = SamplingParams(temperature=1.0)
LENIENT = SamplingParams(temperature=1.0, lenience=LENIENCE)
STRICT = SamplingParams(temperature=1.0, rule="tokenwise")

Tokens = tuple[int, ...]


def comb(name: str) -> Callable[[SamplingParams], tuple[Law, Tensor, float]]:
    length, counts = test_combs.SHAPES[name]
    models = random_models(0, length, torch.float64)
    return lambda params: (models.p, *test_combs.law_of_a_round(models, length, counts, params))


def tree(name: str) -> Callable[[SamplingParams], tuple[Law, Tensor, float]]:
    shape = test_branches.read(name)
    models = random_models(0, shape.length, torch.float64)
    return lambda params: (models.p, *test_branches.law_of_a_round(models, shape, params))


def several(count: int, k: int, certain: int) -> Callable[[SamplingParams], tuple[Law, Tensor, float]]:
    law = test_lines.drafts(1, count, k, certain=certain)
    return lambda params: (law.target.p, *test_lines.law_of_a_round(law, k, params))


KINDS = {
    "every token": comb("every token"),
    "uneven": comb("uneven"),
    "2/4": tree("2/4"),
    "1x2": tree("1x2"),
    "two drafts": several(2, 1, 0),
    "a draft and a copy": several(2, 2, 1),
    "copies": several(3, 2, 3),
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_becomes_likelier_than_p_over_l(kind: str):
    target, joint, kept = KINDS[kind](LENIENT)
    assert joint.sum().item() == pytest.approx(1, abs=EXACT)
    assert excess(target, joint, LENIENCE) <= EXACT
    _, strict, strictly_kept = KINDS[kind](STRICT)
    assert excess(target, strict, 1) <= EXACT
    assert excess(target, joint, 1) > 1e-3, "the loss is seen"
    assert kept > strictly_kept


@pytest.mark.parametrize(("kind", "owner"), [("uneven", combs), ("every token", combs), ("a draft and a copy", lines)])
def test_the_enumeration_sees_what_is_lenient_beyond_the_bound(monkeypatch: pytest.MonkeyPatch, kind: str, owner: Any):
    monkeypatch.setattr(owner, "what_is_left", lambda p, q: p)
    target, joint, _ = KINDS[kind](LENIENT)
    assert excess(target, joint, LENIENCE) > 1e-3


@pytest.mark.parametrize("lenience", [0.5, 0.05])
@pytest.mark.parametrize("kind", ["comb", "tree", "lines"])
def test_a_greedy_row_keeps_the_longest_path_of_tokens_that_are_likely_enough(kind: str, lenience: float):
    models, params = random_models(5, 2, torch.float64, spread=0.5), SamplingParams(lenience=lenience)
    paths, accepted, tokens = {"comb": on_combs, "tree": on_trees, "lines": on_lines}[kind](models, params)
    beyond_the_best = 0
    for own, count, found in zip(paths, accepted, tokens, strict=True):
        stands = tuple(found[:count])
        assert count == max(until_unlikely(models.p, path, lenience) for path in own)
        assert count == until_unlikely(models.p, stands, lenience)
        assert any(path[:count] == stands for path in own), "it was proposed"
        assert found[count] == models.p[stands].argmax(), "the next token is the best"
        beyond_the_best += count > max(until_unlikely(models.p, path, 1) for path in own)
    assert beyond_the_best > 0


def until_unlikely(target: Law, path: Tokens, lenience: float) -> int:
    """How many tokens of a path are each at least so many times as likely as the best in their place."""
    for place, token in enumerate(path):
        p = target[path[:place]]
        if p[token] < lenience * p.max():
            return place
    return len(path)


Found = tuple[list[list[Tokens]], list[int], list[list[int]]]  # the paths proposed, how many stand, what is committed


def on_combs(models: Models, params: SamplingParams) -> Found:
    length, counts = test_combs.SHAPES["uneven"]
    drawn = list(test_combs.all_tokens(models, length, counts))
    judged = test_combs.Combs(models, length, counts, drawn).judge(*everything(drawn), params)
    hung = test_combs.teeth(counts)
    paths = [[one[:length], *((*one[: tooth.place], one[length + i]) for i, tooth in enumerate(hung))] for one in drawn]
    return paths, judged.accepted.tolist(), judged.tokens.tolist()


def on_trees(models: Models, params: SamplingParams) -> Found:
    shape = test_branches.read("2x2")
    nodes = test_branches.nodes_of(shape)
    drawn = list(test_branches.all_tokens(models, nodes))
    judged = test_branches.Trees(models, shape, drawn).judge(*everything(drawn), params)
    paths = [[tuple(one[node.number - 1] for node in own.path) for own in nodes] for one in drawn]
    return paths, judged.accepted.tolist(), judged.tokens.tolist()


def on_lines(models: Models, params: SamplingParams) -> Found:
    every = test_lines.Every(test_lines.Drafts(models, (models.q, models.q)), 2)
    paths: list[list[Tokens]] = [list(drawn) for drawn, *_ in every.cases]
    judged = every.judge(*everything([sum(own, ()) for own in paths]), params)
    return paths, list(map(len, judged.stands)), judged.tokens.tolist()


def everything(drawn: Sequence[Tokens]) -> tuple[Tensor, Tensor]:
    """The places of all that was drawn, and uniforms, which greedy rows do not need."""
    return torch.arange(len(drawn)), torch.full((len(drawn), len(drawn[0])), 0.5, dtype=torch.float64)
