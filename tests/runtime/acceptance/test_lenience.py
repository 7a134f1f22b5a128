"""What lenience does where more than a line is proposed, enumerated by the code that runs: all tokens, all verdicts."""

from types import SimpleNamespace

import pytest
import torch
from trt_spec.runtime import SamplingParams
from trt_spec.runtime.acceptance import descent
from trt_spec.runtime.acceptance.accept import likely_enough

from .distributions import EXACT, Distribution, excess, random_models
from .nodes import Every, distribution_of_a_round, of_lines, of_shape, shaped, some_round

LENIENCE = 0.5
SAMPLED = SamplingParams(temperature=1.0)
LENIENT = SamplingParams(temperature=1.0, lenience=LENIENCE)
STRICT = SamplingParams(temperature=1.0, rule="tokenwise")

Tokens = tuple[int, ...]
SHAPES = ("1+3", "2+3", "2/4", "1x2", "2 drafts, 0 copies of 1", "1 draft, 1 copy of 2", "0 drafts, 3 copies of 2")


@pytest.mark.parametrize("shape", SHAPES)
def test_no_token_becomes_likelier_than_p_over_l(shape: str):
    of = some_round(shape, seed=0)
    joint, kept = distribution_of_a_round(of, LENIENT)
    assert joint.sum().item() == pytest.approx(1, abs=EXACT)
    assert excess(of.target, joint, LENIENCE) <= EXACT
    strict, strictly_kept = distribution_of_a_round(of, STRICT)
    assert excess(of.target, strict, 1) <= EXACT
    assert excess(of.target, joint, 1) > 1e-3, "the loss is seen"
    assert kept > strictly_kept


@pytest.mark.parametrize(("shape", "seed"), [("2+3", 0), ("1+3", 0), ("1 draft, 1 copy of 2", 3)])
def test_the_enumeration_sees_what_is_lenient_beyond_the_bound(monkeypatch: pytest.MonkeyPatch, shape: str, seed: int):
    monkeypatch.setattr(descent, "what_is_left", lambda p, q: p)
    of = some_round(shape, seed)
    assert excess(of.target, distribution_of_a_round(of, LENIENT)[0], LENIENCE) > 1e-3


@pytest.mark.parametrize("lenience", [0.5, 0.05])
@pytest.mark.parametrize("kind", ["2+3", "2x2", "lines"])
def test_a_greedy_row_keeps_the_longest_path_of_tokens_that_are_likely_enough(kind: str, lenience: float):
    models = random_models(5, 2, torch.float64, spread=0.5)
    of = of_lines(models.p, (models.q, models.q), 2) if kind == "lines" else of_shape(models, shaped(kind))
    every = Every(of)
    uniforms = torch.full(every.tokens.shape, 0.5, dtype=torch.float64)  # which greedy rows do not need
    judged = every.judge(torch.arange(len(uniforms)), uniforms, SamplingParams(lenience=lenience))
    beyond_the_best = 0
    for own, stands, found in zip(
        every.said, every.standing(range(len(uniforms)), judged), judged.tokens.tolist(), strict=True
    ):
        count = len(stands)
        assert count == max(until_unlikely(models.p, path, lenience) for path in own)
        assert count == until_unlikely(models.p, stands, lenience)
        assert found[count] == models.p[stands].argmax(), "the next token is the best"
        beyond_the_best += count > max(until_unlikely(models.p, path, 1) for path in own)
    assert beyond_the_best > 0


def test_a_strict_row_beside_a_lenient_one_takes_the_first_of_two_equal_scores_alone() -> None:
    scores, tied = torch.tensor([[[0.0, 2.0, 2.0]]] * 2), torch.tensor([[2]] * 2)
    rows = SimpleNamespace(lenience=torch.tensor([1.0, LENIENCE]))
    assert likely_enough(scores, tied, rows).tolist() == [[False], [True]]


def until_unlikely(target: Distribution, path: Tokens, lenience: float) -> int:
    """How many tokens of a path are each at least so many times as likely as the best in their place."""
    for place, token in enumerate(path):
        p = target[path[:place]]
        if p[token] < lenience * p.max():
            return place
    return len(path)
