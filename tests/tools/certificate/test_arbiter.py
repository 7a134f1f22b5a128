"""A difference is excused only where rounding explains it: between two scores, and at the border of each filter."""

from collections.abc import Sequence
from math import inf

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from trt_spec.runtime import Grammar, SamplingParams, TokenLogprob
from trt_spec.runtime.grammars.compiler import Compiler
from trt_spec.tools.certificate.arbiter import Arbiter, first_difference, log_probabilities_agree

from ...runtime.grammars.vocabularies import DEMO

PROMPT = [0, 1, 2]
GREEDY = SamplingParams()


class Shapes:
    """Stands for a probe: one row of logits for each shape it is asked for."""

    def __init__(self, *logits: Sequence[float]) -> None:
        self.logits_by_shape = [torch.as_tensor(one) for one in logits]
        self.asked: list[tuple[int, int, int]] = []

    def distribution(self, context: Sequence[int], width: int, batch: int, decoded: int) -> Tensor:
        self.asked.append((width, batch, decoded))
        return self.logits_by_shape[min(len(self.asked), len(self.logits_by_shape)) - 1]


def judge(*logits: Sequence[float], params: SamplingParams = GREEDY, output=(1,), expected=(0,), rounding=1e-3):
    return Arbiter(Shapes(*logits), rounding).judge(PROMPT, params, output, expected, 5, 4)


def test_equal_tokens_are_no_difference():
    assert judge([0.0, 1.0], output=(0, 1), expected=(0, 1)) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_the_shapes_that_took_part_are_run():
    shapes = Shapes([0.0, 0.0, 0.0])
    Arbiter(shapes, 1e-3).judge(PROMPT, GREEDY, [2, 1], [2, 0], 5, 4)
    assert shapes.asked == [(1, 1, 2), (4, 1, 2), (4, 4, 2), (1, 1, 0)], "no wider than the context"


def test_a_gap_within_twice_the_difference_of_the_shapes_is_a_near_tie():
    found = judge([1.00002, 1.0, 0], [1.00001, 1.0, 0])
    assert found.near_tie
    assert found.gap == pytest.approx(1e-5, rel=0.1)
    assert found.between_shapes == pytest.approx(1e-5, rel=0.1)
    assert str(found).startswith("near tie at 0: token 1 for 0, gap 1e-05")


@pytest.mark.parametrize(
    ("shapes", "why"),
    [
        ([[1.001, 1.0, 0], [1.001, 1.0, 0]], "the shapes agree"),
        ([[1.0001, 1.0, 0], [1.00009, 1.0, 0]], "the gap is more than what they differ by"),
        ([[1.5, 1.0, 0], [1.0, 1.4, 0]], "more than float32 rounds"),
        ([[1.0001, 1.0, 2.0], [1.0, 1.0001, 2.0]], "a third token wins over both"),
    ],
)
def test_any_other_difference_is_a_bug(shapes: list[list[float]], why: str):
    found = judge(*shapes)
    assert not found.near_tie, why
    assert str(found).startswith("bug at 0")


def test_a_token_that_the_grammar_excludes_wins_over_nothing():
    """After "ab" of (ab)+[cd] are a, c and d; what is likeliest is another."""
    tokenizer = Tokenizer.from_file(str(DEMO.tokenizer_file))
    a, b, c, d, z = (tokenizer.token_to_id(letter) for letter in "abcdz")
    params = SamplingParams(grammar=Grammar.regex("(ab)+[cd]"))
    logits = torch.zeros(4096)
    logits[[c, d, z]] = torch.tensor([1.0, 1.00001, 5.0])
    other = logits.clone()
    other[c] += 2e-5
    outputs = [[a, b, c], [a, b, d]]
    found = Arbiter(Shapes(logits, other), 1e-3, compiler=Compiler(DEMO)).judge(PROMPT, params, *outputs, 5, 4)
    assert found.near_tie
    assert not Arbiter(Shapes(logits, other), 1e-3).judge(PROMPT, params, *outputs, 5, 4).near_tie
    outputs[0][2] = z
    found = Arbiter(Shapes(logits, other), 1e-3, compiler=Compiler(DEMO)).judge(PROMPT, params, *outputs, 5, 4)
    assert not found.near_tie


def test_an_output_that_ends_early_is_a_bug():
    found = judge([1.0, 1.0, 0.0], output=(0,), expected=(0, 1))
    assert not found.near_tie
    assert (found.position, found.tokens, found.gap) == (1, (-1, 1), inf)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_k=2, rule="coupled", seed=0),
        SamplingParams(temperature=1.0, top_p=0.7, rule="coupled", seed=0),
        SamplingParams(temperature=1.0, min_p=0.5, rule="coupled", seed=0),
    ],
)
def test_a_token_at_the_border_of_a_filter_is_a_near_tie(params: SamplingParams, monkeypatch: pytest.MonkeyPatch):
    """Token 2 has the noise to win wherever the filter keeps it; a rounding of 1e-5 decides whether it does."""
    from trt_spec.tools.certificate import exact

    noise = torch.tensor([0.0, 0.0, 9.0, 0.0])
    monkeypatch.setattr(exact, "gumbels", lambda seed, index, size: noise[None, None])
    if params.top_p < 1:  # its likelier two hold the nucleus but for a hair
        shares = torch.tensor([0.35, 0.35, 0.2, 0.1], dtype=torch.float64)
        kept = (shares + torch.tensor([-1e-6, -1e-6, 1e-6, 1e-6])).log()
        cut = (shares + torch.tensor([1e-6, 1e-6, -1e-6, -1e-6])).log()
    elif params.top_k:
        kept, cut = torch.tensor([2.0, 1.0, 1.00001, 0.0]), torch.tensor([2.0, 1.00001, 1.0, 0.0])
    else:
        border = 2.0 + float(torch.tensor(0.5).log())
        kept, cut = torch.tensor([2.0, 1.9, border + 1e-5, 0.0]), torch.tensor([2.0, 1.9, border - 1e-5, 0.0])
    assert judge(kept.tolist(), cut.tolist(), params=params, output=(2,), expected=(0,)).near_tie
    far = cut - torch.tensor([0, 0, 0.5, 0])
    assert not judge(far.tolist(), (far + 1e-5).tolist(), params=params, output=(2,), expected=(0,)).near_tie


def test_log_probabilities_agree_up_to_rounding_and_the_end_of_the_list():
    def listed(chosen: float, *top: tuple[int, float]) -> tuple[TokenLogprob]:
        return (TokenLogprob(3, chosen, top),)

    one = listed(-0.5, (3, -0.5), (4, -2.0))
    assert log_probabilities_agree(one, listed(-0.5001, (3, -0.5001), (9, -2.0)), 1e-3)
    assert not log_probabilities_agree(one, listed(-0.6, (3, -0.5), (4, -2.0)), 1e-3)
    assert not log_probabilities_agree(one, listed(-0.5, (3, -0.5), (4, -2.2)), 1e-3)
    assert not log_probabilities_agree(one, listed(-0.5, (4, -0.5), (3, -2.0)), 1e-3)
    assert log_probabilities_agree(None, None, 1e-3)
