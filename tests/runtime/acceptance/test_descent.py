"""The distribution of what a round on a tree commits: the code that runs, over all tokens and verdicts.

What a draft says after the same token is drawn without replacement, what several drafts say independently, and a copy
is certain. Whatever stands is continued by the target itself.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from trt_spec.runtime import SamplingParams
from trt_spec.runtime.acceptance import accept as accepting
from trt_spec.runtime.acceptance import descent
from trt_spec.runtime.round import growth
from trt_spec.runtime.state.proposal import Proposal
from trt_spec.runtime.state.shapes import Levels, read_shape

from .distributions import EXACT, Models, random_models, with_exclusions
from .nodes import HIGHEST, LEAST, V, distribution_of_a_round, error, of_lines, of_shape, shaped, some_round, uneven
from .nodes import Every as Enumerated

REJECTION = SamplingParams(temperature=1.0)
TOKENWISE = SamplingParams(temperature=1.0, rule="tokenwise")
COUPLED = SamplingParams(temperature=1.0, rule="coupled")
RULES = {"rejection": REJECTION, "tokenwise": TOKENWISE}
ROUNDS = (
    *("1+1", "1+3", "2+2", "2+3"),  # combs: at one place, beside each token, unevenly
    *("2x1", "2/4", "2/5", "1x2", "3"),  # trees
    *("2 drafts, 0 copies of 1", "2 drafts, 1 copy of 1", "1 draft, 1 copy of 2", "0 drafts, 3 copies of 2"),
)
LONG = ("3+2", "2x2", "3/5", "3 drafts, 0 copies of 1", "2 drafts, 0 copies of 2", "1 draft, 2 copies of 2")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", [*ROUNDS, *(pytest.param(shape, marks=pytest.mark.exhaustive) for shape in LONG)])
def test_what_a_round_commits_is_distributed_as_the_targets(shape: str, rule: str):
    assert error(some_round(shape), RULES[rule]) <= EXACT


def test_leaves_at_the_end_of_a_line_are_no_exception():
    assert error(of_shape(random_models(0, 2, torch.float64), uneven(2, 0, 2)), REJECTION) <= EXACT


def test_lines_of_different_lengths_are_no_exception():
    for lengths in ([1, 2], [0, 2]):
        assert error(some_round("1 draft, 1 copy of 2", seed=2), REJECTION, lengths) <= EXACT, lengths


@pytest.mark.parametrize("shape", ["2+3", "2/4"])
def test_filters_that_leave_tokens_out_change_nothing_of_it(shape: str):
    assert error(of_shape(with_exclusions(random_models(1, 2, torch.float64)), shaped(shape)), REJECTION) <= EXACT


def test_filters_change_nothing_of_several_lines_either():
    models = [with_exclusions(random_models(seed, 1, torch.float64)) for seed in (3, 4)]
    assert error(of_lines(models[0].p, [one.q for one in models], 1), REJECTION) <= EXACT


@pytest.mark.parametrize("shape", ["2+2", "2x1"])
@pytest.mark.parametrize("spread", [0.0, 12.0])
def test_equal_and_nearly_certain_distributions_are_no_exception(spread: float, shape: str):
    models = random_models(3, 2, torch.float64, spread)
    assert error(of_shape(models, shaped(shape)), REJECTION) <= EXACT
    same = of_shape(Models(models.p, models.p), shaped(shape))
    assert error(same, REJECTION) <= EXACT, "the draft is the target: the line stands"


@pytest.mark.parametrize("rule", RULES)
def test_a_first_line_that_is_the_targets_own_never_falls(rule: str):
    models = random_models(4, 1, torch.float64)
    assert distribution_of_a_round(of_lines(models.p, [models.p, models.q], 1), RULES[rule])[1] == pytest.approx(1)


@pytest.mark.parametrize("shape", ["2+3", "2/4", "1 draft, 1 copy of 1"])
def test_in_float32_only_rounding_differs(shape: str):
    assert error(some_round(shape, seed=1, dtype=torch.float32), REJECTION) <= 2e-6


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shapes", [("1+1", "1+2", "1+3"), ("2/3", "2/4", "2/5")], ids=str)
def test_each_branch_is_one_more_chance(shapes: tuple[str, ...], rule: str):
    kept = [distribution_of_a_round(some_round(shape), RULES[rule])[1] for shape in shapes]
    assert kept == sorted(set(kept))
    assert "1+3" not in shapes or kept[-1] == pytest.approx(1), "with all tokens of the vocabulary proposed, one stands"


def test_each_line_is_one_more_chance():
    several = some_round("3 drafts, 0 copies of 1", seed=6)
    alone = [torch.minimum(several.target[()], several.q(drafter, ())).sum().item() for drafter in range(3)]
    kept = [
        distribution_of_a_round(of_lines(several.target, several.drafts[:count], 1), REJECTION)[1] for count in (2, 3)
    ]
    assert max(alone[:2]) < kept[0] < kept[1]
    assert alone[2] < kept[1]


def test_behind_a_block_all_else_is_one_more_chance():
    """So the rejection rule keeps at least what it keeps of the first line alone, and more than tokenwise."""
    several, models = some_round("2 drafts, 0 copies of 2", seed=8), random_models(0, 2, torch.float64)
    for more, lengths, fewer in (
        (several, [2, 0], several),
        (of_shape(models, uneven(2, 1, 1)), None, of_shape(models, uneven(2, 0, 1))),
    ):
        kept = distribution_of_a_round(more, REJECTION)[1]
        assert distribution_of_a_round(fewer, REJECTION, lengths)[1] < kept
        assert distribution_of_a_round(more, TOKENWISE)[1] < kept


DESCEND, DISTRIBUTION_OF = accepting.descend, Proposal.drawn_from


def forgets_what_fell(distribution: Tensor, *others: Any) -> Tensor:
    """A planted fault: the next token is drawn as if only the line had been tested."""
    verdict = others[-1].verdict
    accepted, found = verdict.accepted.clone(), DESCEND(distribution, *others)
    return torch.where((verdict.accepted == accepted)[:, None], distribution, found)


@pytest.mark.parametrize(
    ("owner", "name", "careless", "shape"),
    [
        (descent, "without", lambda q, token: q, "2+3"),
        (descent, "without", lambda q, token: q, "2/5"),
        (accepting, "descend", forgets_what_fell, "2+3"),
        (accepting, "descend", forgets_what_fell, "2 drafts, 0 copies of 1"),
        (
            Proposal,
            "drawn_from",
            lambda self, distribution, *others: DISTRIBUTION_OF(self, distribution * 0, *others),
            "2x1",
        ),
        (
            Proposal,
            "drawn_from",
            lambda self, distribution, *others: DISTRIBUTION_OF(self, distribution * 0, *others),
            "2 drafts, 0 copies of 1",
        ),
        (descent, "NEGLIGIBLE", 1.0, "2 drafts, 0 copies of 1"),
    ],
)
@pytest.mark.parametrize("rule", ["rejection", pytest.param("tokenwise", marks=pytest.mark.exhaustive)])
def test_the_enumeration_sees_a_wrong_test(
    monkeypatch: pytest.MonkeyPatch, rule: str, owner: Any, name: str, careless: Any, shape: str
):
    monkeypatch.setattr(owner, name, careless)
    assert error(some_round(shape), RULES[rule]) > 1e-4


@pytest.mark.parametrize("shape", ["2+3", "2x2", "2 drafts, 0 copies of 2"])
def test_the_coupled_walk_is_the_targets_own_picks(shape: str):
    """Whatever is proposed, what stands and the next token are what the target picks by itself."""
    generator = torch.Generator().manual_seed(1)
    of = some_round(shape, seed=5)
    every = Enumerated(of)
    batch, size = every.tokens.shape
    gumbel = torch.randn(1, of.k + 1, V, generator=generator, dtype=torch.float64).expand(batch, -1, -1).contiguous()
    judged = every.judge(torch.arange(batch), torch.full((batch, size), 0.5, dtype=torch.float64), COUPLED, gumbel)
    text: tuple[int, ...] = ()
    for index in range(of.k + 1):
        text += (int((of.target[text].log() + gumbel[0, index]).argmax()),)
    for stands, found, said in zip(
        every.standing(range(batch), judged), judged.tokens.tolist(), every.said, strict=True
    ):
        assert tuple(found[: len(stands) + 1]) == text[: len(stands) + 1]
        assert len(stands) == max(len(path) for path in said if text[: len(path)] == path), "the longest that agrees"
    assert set(judged.accepted.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("shape", ["2+3", "2/5", "1 draft, 1 copy of 2"])
def test_proposed_is_what_is_deepest_behind_what_stands(shape: str):
    every = Enumerated(some_round(shape))
    batch, size = every.tokens.shape
    u = torch.rand(batch, size, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    judged = every.judge(torch.arange(batch), u, TOKENWISE)
    for stands, proposed, said in zip(
        every.standing(range(batch), judged), judged.proposed.tolist(), every.said, strict=True
    ):
        assert proposed == max(len(path) for path in said if path[: len(stands)] == stands)


def test_another_line_goes_on_where_it_has_said_what_stands_of_the_first():
    every = Enumerated(some_round("2 drafts, 0 copies of 2"))
    u = torch.full(every.tokens.shape, LEAST, dtype=torch.float64)
    u[:, 1] = HIGHEST  # the first line's second token fails where it can
    judged = every.judge(torch.arange(len(u)), u, TOKENWISE)
    lines = every.tokens.view(-1, 2, 2)
    agrees = lines[:, 0, 0] == lines[:, 1, 0]
    on_it = (judged.accepted == 2) & (judged.path[:, 2] == 4)
    assert bool((agrees & on_it).any())
    assert not bool((on_it & ~agrees & (judged.path[:, 1] == 1)).any())


def test_children_are_drawn_from_what_is_left(monkeypatch: pytest.MonkeyPatch):
    weights: list[Tensor] = []
    draw = growth.inverse_cdf
    monkeypatch.setattr(growth, "inverse_cdf", lambda left, u: (weights.append(left.clone()), draw(left, u))[1])
    q = torch.tensor([[[0.1, 0.2, 0.3, 0.4], [0.0, 0.5, 0.5, 0.0]]])
    u = torch.full((1, 2, 3), 0.7).double()
    for line, own in ([[3]], [2, 1]), ([[3, 1]], [1, 2]):  # of the first node, or of both
        weights.clear()
        found = growth.drawn_in_turn(q, torch.tensor(line), u)
        assert found.tokens[0].tolist()[0] == [3, 2, 1], "the line's own before the others"
        assert found.tokens[0].tolist()[1][:2] == own
        assert torch.equal(weights[-2][0], torch.tensor([0.1, 0.2, 0.3, 0.0])), "without the line's token"
        assert (found.shares > 0).tolist() == [[[True] * 3, [True, True, False]]], "nothing is left of two tokens"


def test_no_child_stands_beside_itself_or_is_excluded():
    scores = torch.tensor([[[5.0, 5.0, 1.0, -torch.inf], [1.0, 2.0, -torch.inf, -torch.inf]]])
    for own in (0, 1):
        found = growth.nearly_picked(scores[:, :1].clone(), torch.tensor([[own]]), scores[:, 1:], 4)
        assert found.tokens[0, 0, :3].tolist() == [own, 1 - own, 2]
        assert found.tokens[0, 1, :2].tolist() == [1, 0]
        assert (found.shares > 0).tolist() == [[[True, True, True, False], [True, True, False, False]]]
        beside_each = growth.nearly_picked(scores.clone(), torch.tensor([[own, 1]]), None, 4)
        assert torch.equal(found.shares, beside_each.shares)


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("3x2x1", [[(0, 1), (0, 2)], [(0, 1), (1, 0), (1, 1), (2, 0), (2, 1)], [(node, 0) for node in range(1, 6)]]),
        ("1x2", [[], [(0, 1)]]),
        ("4/4", [[]] * 4),
        ("2/5", [[(0, 1)], [(0, 1), (1, 0)]]),
        ("3+4", [[(0, 1), (0, 2), (1, 1), (2, 1)]]),
    ],
)
def test_a_shape_says_where_its_branches_are(text: str, levels: Levels):
    shape = read_shape(text)
    assert [[tuple(branch) for branch in level] for level in shape.levels] == levels
    assert str(shape) == text
    assert shape.nodes == shape.length + sum(map(len, levels))


@pytest.mark.parametrize("text", ["16/64", "4/12", "8/56", "3/51"])
def test_the_likeliest_branches_follow_what_is_there(text: str):
    shape = read_shape(text)
    assert sum(map(len, shape.levels)) == shape.beyond
    children: list[Counter[int]] = []
    for before, level in zip(((), *shape.levels), shape.levels, strict=False):
        assert len(set(level)) == len(level)
        assert all(branch.parent <= len(before) for branch in level)
        children.append(Counter(branch.parent for branch in level))
        for branch in level:  # those tested before it are there, too
            assert branch.rank < children[-1][branch.parent] + (branch.parent == 0)


@pytest.mark.parametrize("text", ["16+48", "5+3", "2+6", "3+1"])
def test_the_likeliest_leaves_are_beside_the_first_tokens(text: str):
    shape = read_shape(text)
    [leaves] = shape.levels
    beside = [sum(branch.parent == place for branch in leaves) for place in range(shape.length)]
    assert sum(beside) == shape.beyond
    assert beside == sorted(beside, reverse=True)


def test_a_shape_that_finds_less_room_keeps_its_line():
    for text, room, found in (("5+3", 2, "5+2"), ("4/12", 5, "4/9"), ("3x2x1", 8, "3"), ("3x2x1", 12, "3x2x1")):
        assert str(read_shape(text).within(room)) == found
