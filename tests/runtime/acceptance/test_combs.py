"""The law of what a round on a comb commits, enumerated by the code that runs: all tokens, all verdicts.

Lines are drawn from the draft, siblings from what is left of it; whatever stands is continued by the target itself.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import permutations, product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from trt_spec.runtime import SamplingParams
from trt_spec.runtime.acceptance import combs, trees
from trt_spec.runtime.acceptance import one_line as acceptance
from trt_spec.runtime.acceptance.seat import admit, make_rows
from trt_spec.runtime.acceptance.trees import accept_tree
from trt_spec.runtime.round import siblings
from trt_spec.runtime.state.noise import MOST_SIBLINGS, of_rank
from trt_spec.runtime.state.proposal import Noise, Proposal
from trt_spec.runtime.state.tree import Tree
from trt_spec.runtime.state.verdict import TreeVerdict

from ..states import make_plan
from .laws import EXACT, Models, V, random_models, verdicts, with_exclusions

REJECTION = SamplingParams(temperature=1.0)
TOKENWISE = SamplingParams(temperature=1.0, rule="tokenwise")
COUPLED = SamplingParams(temperature=1.0, rule="coupled")
LEAST, HIGHEST = 2.0**-49, 1 - 2.0**-49
SHAPES = {  # length of the line, and how many siblings are beside each of its tokens
    "one place": (1, [1]),
    "every token": (1, [3]),
    "two places": (2, [1, 1]),
    "uneven": (2, [2, 1]),
    "at the end": (2, [0, 2]),
}
LONG = {"three places": (3, [1, 0, 1])}


class Tooth(NamedTuple):
    """A sibling: the place that it is beside, and its rank there."""

    place: int
    rank: int


def teeth(counts: Sequence[int]) -> list[Tooth]:
    return [Tooth(place, rank + 1) for place, count in enumerate(counts) for rank in range(count)]


def all_tokens(models: Models, length: int, counts: Sequence[int]) -> dict[tuple[int, ...], float]:
    """All tokens of a comb, the line's first, with the probability that the draft draws them."""
    found = {}
    for line in product(range(V), repeat=length):
        each = [permutations([token for token in range(V) if token != line[i]], counts[i]) for i in range(length)]
        for beside in product(*each):
            mass = 1.0
            for i, own in enumerate(beside):
                left = models.q[line[:i]].double().clone()
                for token in (line[i], *own):
                    mass *= (left[token] / left.sum()).item() if left[token] > 0 else 0.0
                    left[token] = 0
            if mass > 0:
                found[line + tuple(token for own in beside for token in own)] = mass
    return found


class Judged(NamedTuple):
    path: Tensor  # [A, K+1]
    accepted: Tensor  # [A]
    weights: Tensor  # [A, V] of the next token
    tokens: Tensor  # [A, K+1]


class Combs:
    """All combs of a shape, and the distributions that their tokens come from and are judged by."""

    def __init__(self, models: Models, length: int, counts: Sequence[int], tokens: Sequence[tuple[int, ...]]) -> None:
        self.length, self.hung = length, teeth(counts)
        self.tokens = torch.tensor(tokens)
        lines = [one[:length] for one in tokens]
        ends = [[one[length + s : length + s + 1] for s in range(len(self.hung))] for one in tokens]
        self.p = torch.stack(
            [
                torch.stack(
                    [
                        *(models.p[line[:i]] for i in range(length + 1)),
                        *(models.p[line[: tooth.place] + end] for tooth, end in zip(self.hung, own, strict=True)),
                    ]
                )
                for line, own in zip(lines, ends, strict=True)
            ]
        )
        self.q = torch.stack([torch.stack([models.q[line[:i]] for i in range(length)]) for line in lines])

    def judge(self, index: Tensor, u: Tensor, params: SamplingParams, gumbel: Tensor | None = None) -> Judged:
        """Judge the combs at `index` [A] by uniforms u [A, N]."""
        batch, length, hung = len(index), self.length, self.hung
        p, q = self.p[index], self.q[index]
        tree = Tree(batch, length, 1, len(hung), torch.device("cpu"))
        places, ranks = (torch.tensor([one[i] for one in hung]).expand(batch, -1) for i in range(2))
        tree.hang(places, ranks, torch.ones(batch, len(hung), dtype=torch.bool), torch.ones(batch, dtype=torch.bool))
        tree.end_lines(torch.full((batch, 1), length))
        own = torch.zeros(batch, 3 * 16, 2, dtype=u.dtype)
        for s, one in enumerate(hung):
            own[:, of_rank(one.rank, length).start + one.place, 1] = u[:, length + s]
        draw = torch.full((batch, 1), 0.5, dtype=torch.float64)
        rows = make_rows(1, 1, V, 1, "cpu")
        admit(rows, 0, [0], params, 0, V)
        rows.siblings.fill_(len(hung))
        plan = make_plan([params] * batch, length, siblings=len(hung))
        verdict, seen = TreeVerdict(p.log(), length), []
        pick = acceptance.inverse_cdf
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(acceptance, "inverse_cdf", lambda weights, u: (seen.append(weights), pick(weights, u))[1])
            proposal = Proposal(self.tokens[index], torch.full((batch,), length), q, None, tree)
            accept_tree(proposal, p.log(), rows, plan, Noise(gumbel, draw, u[:, :length], own), verdict)
        return Judged(verdict.path, verdict.accepted, seen[-1] if seen else p[:, 0], verdict.tokens)

    def thresholds(self, params: SamplingParams) -> Tensor:
        """The uniform up to which each node passes [A, N] if it comes to it, found by asking the code that runs."""
        count, nodes = self.tokens.shape
        index, node = torch.arange(count).repeat_interleave(nodes), torch.arange(nodes).repeat(count)
        place = torch.tensor([*range(self.length), *(tooth.place for tooth in self.hung)])[node]
        u = torch.full((count * nodes, nodes), HIGHEST, dtype=torch.float64)
        u[torch.arange(nodes) < place[:, None]] = LEAST  # the line up to there passes where it can
        low, high = torch.zeros(len(index), dtype=torch.float64), torch.ones(len(index), dtype=torch.float64)
        for _ in range(50):
            middle = (low + high) / 2
            path = self.judge(index, u.scatter(1, node[:, None], middle[:, None]), params).path
            passed = (path == node[:, None] + 1).any(1)
            low, high = torch.where(passed, middle, low), torch.where(passed, high, middle)
        return torch.where(low < 2 * LEAST, 0.0, low).view(count, nodes)


def law_of_a_round(models: Models, length: int, counts: Sequence[int], params: SamplingParams) -> tuple[Tensor, float]:
    """Return the joint of K + 1 tokens after a round, and how many proposals stand on average."""
    drawn = all_tokens(models, length, counts)
    every = Combs(models, length, counts, list(drawn))
    rows, masses, u = [], [], []
    for index, (first, chance) in enumerate(zip(drawn.values(), every.thresholds(params).tolist(), strict=True)):
        for mass, uniforms in verdicts(first, chance):
            rows.append(index)
            masses.append(mass)
            u.append(uniforms)
    judged = every.judge(torch.tensor(rows), torch.tensor(u, dtype=torch.float64), params)
    begun: Counter[tuple[int, ...]] = Counter()
    proposed = every.tokens[rows].tolist()
    for tokens, mass, path, accepted, weights in zip(
        proposed, masses, judged.path.tolist(), judged.accepted.tolist(), judged.weights.double(), strict=True
    ):
        stands = tuple(tokens[node - 1] for node in path[1 : accepted + 1])
        for token, share in enumerate((weights / weights.sum()).tolist()):
            begun[*stands, token] += mass * share
    law = torch.zeros(*[V] * (length + 1), dtype=torch.float64)
    for tokens, mass in begun.items():
        law[tokens] += mass * models.target_after(tokens, length + 1)
    standing = sum(mass * stands for mass, stands in zip(masses, judged.accepted.tolist(), strict=True))
    return law.flatten(), standing


def error(models: Models, shape: str, params: SamplingParams = REJECTION) -> float:
    length, counts = (SHAPES | LONG)[shape]
    law, _ = law_of_a_round(models, length, counts, params)
    return (law - models.target_after((), length + 1).flatten()).abs().max().item()


@pytest.mark.parametrize("params", [REJECTION, TOKENWISE], ids=["rejection", "tokenwise"])
@pytest.mark.parametrize("shape", [*SHAPES, *(pytest.param(shape, marks=pytest.mark.exhaustive) for shape in LONG)])
def test_what_a_round_on_a_comb_commits_is_distributed_as_the_targets(shape: str, params: SamplingParams):
    assert error(random_models(0, (SHAPES | LONG)[shape][0], torch.float64), shape, params) <= EXACT


def test_filters_that_leave_tokens_out_change_nothing_of_it():
    assert error(with_exclusions(random_models(1, 2, torch.float64)), "uneven") <= EXACT


@pytest.mark.parametrize("spread", [0.0, 12.0])
def test_equal_and_nearly_certain_distributions_are_no_exception(spread: float):
    models = random_models(3, 2, torch.float64, spread)
    assert error(models, "two places") <= EXACT
    assert error(Models(models.p, models.p), "two places") <= EXACT, "the draft is the target: the line stands"


def test_in_float32_only_rounding_differs():
    assert error(random_models(1, 2, torch.float32), "uneven") <= 2e-6


def test_each_sibling_is_one_more_chance():
    models = random_models(0, 1, torch.float64)
    kept = [law_of_a_round(models, 1, [count], REJECTION)[1] for count in (1, 2, 3)]
    assert kept[0] < kept[1] < kept[2] == pytest.approx(1), "with all tokens of the vocabulary proposed, one stands"
    assert law_of_a_round(models, 1, [2], TOKENWISE)[1] == pytest.approx(kept[1]), "at one place the rules are one"


def test_behind_a_block_siblings_are_one_more_chance_too():
    """So the rejection rule keeps more of a comb than tokenwise, as it does of a line."""
    models = random_models(0, 2, torch.float64)
    fewer, hung, by_token = (
        law_of_a_round(models, 2, counts, params)[1]
        for counts, params in (([0, 1], REJECTION), ([1, 1], REJECTION), ([1, 1], TOKENWISE))
    )
    assert fewer < hung
    assert by_token < hung


EXAMINE = trees.examine_children


@pytest.mark.parametrize(
    ("owner", "name", "careless"),
    [
        (combs, "without", lambda q, token: q),
        (trees, "examine_children", lambda law, *others: (EXAMINE(law, *others)[0], law)),
    ],
    ids=["what was tested stays in q", "the next token is drawn as if only the line had been tested"],
)
@pytest.mark.parametrize("params", [REJECTION, TOKENWISE], ids=["rejection", "tokenwise"])
def test_the_enumeration_sees_a_law_that_is_not_renormalised(
    monkeypatch: pytest.MonkeyPatch, params: SamplingParams, owner: Any, name: str, careless: Any
):
    monkeypatch.setattr(owner, name, careless)
    assert error(random_models(0, 2, torch.float64), "uneven", params) > 1e-4


def test_siblings_are_drawn_from_what_is_left(monkeypatch: pytest.MonkeyPatch):
    weights: list[Tensor] = []
    draw = siblings.inverse_cdf
    monkeypatch.setattr(siblings, "inverse_cdf", lambda left, u: (weights.append(left.clone()), draw(left, u))[1])
    q = torch.tensor([[[0.1, 0.2, 0.3, 0.4], [0.0, 0.5, 0.5, 0.0]]])
    found = siblings.drawn_without_replacement(q, torch.tensor([[3, 1]]), torch.full((1, 48), 0.7).double(), 3)
    assert found.tokens[0, 0].tolist() == [2, 1, 0]
    assert torch.equal(weights[1][0], torch.tensor([0.1, 0.2, 0.0, 0.0])), "without the line's token and the first"
    assert (found.worth > 0).tolist() == [[[True] * 3, [True, False, False]]], "nothing is left of two tokens"


def test_no_sibling_is_the_lines_own_token_or_an_excluded_one():
    scores = torch.tensor([[[5.0, 5.0, 1.0, -torch.inf]]])
    for own in (0, 1):
        found = siblings.nearly_picked(scores.clone(), torch.tensor([[own]]), 3)
        assert found.tokens[0, 0, :2].tolist() == [1 - own, 2]
        assert (found.worth > 0).tolist() == [[[True, True, False]]]


def test_the_coupled_walk_is_the_targets_own_picks():
    """Whatever the tokens of the comb are, what stands and the next token are what the target picks by itself."""
    generator = torch.Generator().manual_seed(1)
    models = random_models(5, 2, torch.float64)
    length, counts = SHAPES["uneven"]
    tokens = list(all_tokens(models, length, counts))
    gumbel = torch.randn(1, length + 1, V, generator=generator, dtype=torch.float64).expand(len(tokens), -1, -1)
    u = torch.full((len(tokens), 5), 0.5, dtype=torch.float64)
    every = Combs(models, length, counts, tokens)
    judged = every.judge(torch.arange(len(tokens)), u, COUPLED, gumbel.contiguous())
    text: tuple[int, ...] = ()
    for index in range(length + 1):
        text += (int((models.p[text].log() + gumbel[0, index]).argmax()),)
    for accepted, found, proposed in zip(judged.accepted.tolist(), judged.tokens.tolist(), tokens, strict=True):
        assert tuple(found[: accepted + 1]) == text[: accepted + 1]
        firsts = {proposed[0], *proposed[length : length + counts[0]]}
        assert (accepted > 0) == (text[0] in firsts)
    assert set(judged.accepted.tolist()) == {0, 1, 2}


def test_the_best_places_get_the_siblings():
    worth = siblings.worth_unseen(3, MOST_SIBLINGS, torch.device("cpu"))
    assert worth.flatten().unique().numel() == worth.numel(), "no two are equal, so that one order holds"
    assert bool((worth[:, :-1] > worth[:, 1:]).all())
    assert bool((worth[:-1] > worth[1:]).all())
