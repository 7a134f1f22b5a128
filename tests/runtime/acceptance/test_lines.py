"""The law of what a round of several lines commits, enumerated by the code that runs: all tokens, orders and verdicts.

Each line is drawn from a draft of its own; whatever stands is continued by the target itself.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from trt_spec.runtime import SamplingParams
from trt_spec.runtime.acceptance import combs, lines
from trt_spec.runtime.acceptance import one_line as acceptance
from trt_spec.runtime.acceptance.seat import admit, make_rows
from trt_spec.runtime.acceptance.trees import accept_tree
from trt_spec.runtime.state.noise import of_rank
from trt_spec.runtime.state.proposal import Noise, Proposal
from trt_spec.runtime.state.tree import Tree
from trt_spec.runtime.state.verdict import TreeVerdict

from ..states import GIVEN, make_plan
from .laws import EXACT, Law, Models, V, mass_of, random_models, verdicts, with_exclusions

RULES = [SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, rule="tokenwise")]
COUPLED = SamplingParams(temperature=1.0, rule="coupled")
LEAST, HIGHEST = 2.0**-49, 1 - 2.0**-49


class Drafts(NamedTuple):
    """A target, and for each line the draft that it is drawn from; None is always sure of the token of its number."""

    target: Models
    lines: tuple[Law | None, ...]

    def q(self, line: int) -> Law:
        law = self.lines[line]
        return dict.fromkeys(self.target.p, torch.eye(V, dtype=torch.float64)[line]) if law is None else law


def drafts(seed: int, count: int, k: int, dtype: torch.dtype = torch.float64, certain: int = 0) -> Drafts:
    target = random_models(seed, k, dtype)
    laws: list[Law | None] = [random_models(10 * seed + line, k, dtype).q for line in range(count - certain)]
    return Drafts(target, (*laws, *[None] * certain))


class Judged(NamedTuple):
    stands: list[tuple[int, ...]]
    weights: Tensor  # [A, V] of the next token
    tokens: Tensor  # [A, K+1]


class Every:
    """All tokens of so many lines, each in each order of the tests."""

    def __init__(self, law: Drafts, k: int, counts: Sequence[int] | None = None) -> None:
        self.law, self.k, self.lines = law, k, len(law.lines)
        self.counts = counts or [k] * self.lines
        each = list(product(range(V), repeat=k))
        cases = [
            (drawn, order, prod(mass_of(law.q(line), one) for line, one in enumerate(drawn)) / self.lines)
            for drawn in product(each, repeat=self.lines)
            for order in range(self.lines)
        ]
        self.cases = [case for case in cases if case[2] > 0]
        self.tokens = torch.tensor([drawn for drawn, *_ in self.cases])  # [N, D, K]
        self.p = torch.stack(
            [
                torch.stack([law.target.p[()], *(law.target.p[one[: i + 1]] for one in drawn for i in range(k))])
                for drawn, *_ in self.cases
            ]
        )
        self.q = [
            None
            if law.lines[line] is None
            else torch.stack(
                [torch.stack([law.q(line)[drawn[line][:i]] for i in range(k)]) for drawn, *_ in self.cases]
            )
            for line in range(self.lines)
        ]

    @staticmethod
    def along(draft: Law, tokens: tuple[int, ...]) -> Tensor:
        return torch.stack([draft[tokens[:i]] for i in range(len(tokens))])

    def judge(self, index: Tensor, u: Tensor, params: SamplingParams, gumbel: Tensor | None = None) -> Judged:
        """Judge the cases at `index` [A] by uniforms u [A, D · K]."""
        batch, k, p = len(index), self.k, self.p[index]
        tree = Tree(batch, k, self.lines, 0, torch.device("cpu"))
        counts = torch.tensor(self.counts).expand(batch, -1).contiguous()
        tree.end_lines(counts)
        order = torch.tensor([(order + 0.5) / self.lines for _, order, _ in self.cases], dtype=torch.float64)[index]
        test = torch.cat([u[:, :k], order[:, None]], 1)
        beyond = torch.zeros(batch, 3 * 16, 2, dtype=u.dtype)
        for line in range(1, self.lines):
            beyond[:, of_rank(line, k), 1] = u[:, line * k : (line + 1) * k]
        rows = make_rows(1, 1, V, 1, "cpu")
        admit(rows, 0, [0], params, 0, V)
        rows.lines.fill_(self.lines)
        plan = make_plan([params] * batch, k, beside=((GIVEN,),) * (self.lines - 1), ragged=True)
        laws = tuple(q if q is None else q[index] for q in self.q)
        proposal = Proposal(self.tokens[index].flatten(1), counts[:, 0], laws[0], None, tree, counts, laws)
        verdict, seen, pick = TreeVerdict(p.log(), k), [], acceptance.inverse_cdf
        draw = torch.full((batch, 1), 0.5, dtype=torch.float64)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(acceptance, "inverse_cdf", lambda weights, u: (seen.append(weights), pick(weights, u))[1])
            accept_tree(proposal, p.log(), rows, plan, Noise(gumbel, draw, test, beyond), verdict)
        stands = [
            tuple(found[:accepted])
            for found, accepted in zip(verdict.tokens.tolist(), verdict.accepted.tolist(), strict=True)
        ]
        nodes = self.tokens[index].flatten(1).gather(1, (verdict.path[:, 1:] - 1).clamp_(min=0)).tolist()
        assert [tuple(one[: len(stood)]) for one, stood in zip(nodes, stands, strict=True)] == stands, "of the path"
        assert verdict.last.tolist() == [
            path[len(stood)] for path, stood in zip(verdict.path.tolist(), stands, strict=True)
        ]
        return Judged(stands, seen[-1] if seen else p[:, 0], verdict.tokens)

    def thresholds(self, params: SamplingParams) -> Tensor:
        """The uniform up to which each token passes [N, D · K] if it comes to it, found by asking the code."""
        count, (lines, k) = len(self.cases), self.tokens.shape[1:]
        nodes = lines * k
        index, node = torch.arange(count).repeat_interleave(nodes), torch.arange(nodes).repeat(count)
        tokens, line, place = self.tokens[index], node // k, node % k
        own = tokens[torch.arange(len(index)), line]
        u = torch.full((len(index), lines, k), HIGHEST, dtype=torch.float64)
        # All that has the same tokens up to there passes where it can.
        same = (tokens == own[:, None]).cumprod(2).bool()
        u[same & (torch.arange(k) < place[:, None])[:, None]] = LEAST
        low, high = torch.zeros(len(index), dtype=torch.float64), torch.ones(len(index), dtype=torch.float64)
        for _ in range(50):
            middle = (low + high) / 2
            stands = self.judge(index, u.flatten(1).scatter(1, node[:, None], middle[:, None]), params).stands
            passed = torch.tensor(
                [
                    len(stood) > at and stood[: at + 1] == tuple(mine[: at + 1])
                    for stood, at, mine in zip(stands, place.tolist(), own.tolist(), strict=True)
                ]
            )
            low, high = torch.where(passed, middle, low), torch.where(passed, high, middle)
        return torch.where(low < 2 * LEAST, 0.0, low).view(count, nodes)


def law_of_a_round(
    law: Drafts, k: int, params: SamplingParams, counts: Sequence[int] | None = None
) -> tuple[Tensor, float]:
    """Return the joint of K + 1 tokens after a round, and how many proposals stand on average."""
    every = Every(law, k, counts)
    rows, masses, u = [], [], []
    for index, ((*_, first), chance) in enumerate(zip(every.cases, every.thresholds(params).tolist(), strict=True)):
        for mass, uniforms in verdicts(first, chance):
            rows.append(index)
            masses.append(mass)
            u.append(uniforms)
    judged = every.judge(torch.tensor(rows), torch.tensor(u, dtype=torch.float64), params)
    begun: Counter[tuple[int, ...]] = Counter()
    shares = (judged.weights.double() / judged.weights.double().sum(1, keepdim=True)).tolist()
    for stands, mass, each in zip(judged.stands, masses, shares, strict=True):
        for token, share in enumerate(each):
            begun[*stands, token] += mass * share
    found = torch.zeros(*[V] * (k + 1), dtype=torch.float64)
    for tokens, mass in begun.items():
        found[tokens] += mass * law.target.target_after(tokens, k + 1)
    return found.flatten(), sum(mass * len(stands) for mass, stands in zip(masses, judged.stands, strict=True))


def error(law: Drafts, k: int, params: SamplingParams = RULES[0], counts: Sequence[int] | None = None) -> float:
    found, _ = law_of_a_round(law, k, params, counts)
    return (found - law.target.target_after((), k + 1).flatten()).abs().max().item()


@pytest.mark.parametrize("params", RULES, ids=["rejection", "tokenwise"])
@pytest.mark.parametrize(
    ("count", "k", "certain"),
    [
        (2, 1, 0),
        (3, 1, 1),
        (2, 2, 1),
        (3, 2, 3),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in ((3, 1, 0), (2, 2, 0), (3, 2, 2))),
    ],
)
def test_what_several_lines_commit_is_distributed_as_the_targets(
    count: int, k: int, certain: int, params: SamplingParams
):
    assert error(drafts(1, count, k, certain=certain), k, params) <= EXACT


def test_lines_of_different_lengths_are_no_exception():
    for counts in ([1, 2], [0, 2]):
        assert error(drafts(2, 2, 2, certain=1), 2, counts=counts) <= EXACT, counts


def test_filters_that_leave_tokens_out_change_nothing_of_it():
    law = drafts(3, 2, 1)
    models = with_exclusions(law.target)
    others = [with_exclusions(Models(law.target.p, law.q(line))).q for line in range(2)]
    assert error(Drafts(models, tuple(others)), 1) <= EXACT


def test_drafts_that_are_the_target_itself_are_never_refused():
    target = random_models(4, 1, torch.float64)
    found, standing = law_of_a_round(Drafts(target, (target.p, target.q)), 1, RULES[0])
    assert (found - target.target_after((), 2).flatten()).abs().max() <= EXACT
    assert standing == pytest.approx(1), "the first line is judged by itself"
    assert law_of_a_round(Drafts(target, (target.p, target.q)), 1, RULES[1])[1] < 1, "the other line may come first"
    assert law_of_a_round(Drafts(target, (target.p, target.p)), 1, RULES[1])[1] == pytest.approx(1)


def test_behind_a_block_other_lines_are_one_more_chance():
    """So the rejection rule keeps at least what it keeps of the first line alone, and more than tokenwise."""
    law = drafts(8, 2, 2)
    several, by_token = (law_of_a_round(law, 2, params)[1] for params in RULES)
    alone = law_of_a_round(law, 2, RULES[0], counts=[2, 0])[1]
    assert alone < several
    assert by_token < several


def test_in_float32_only_rounding_differs():
    assert error(drafts(5, 2, 1, torch.float32), 1) <= 2e-6


def test_each_line_is_one_more_chance():
    law = drafts(6, 3, 1)
    kept = [law_of_a_round(Drafts(law.target, law.lines[:count]), 1, RULES[0])[1] for count in (2, 3)]
    alone = [
        sum(torch.minimum(law.target.p[()], law.q(line)[()]).tolist()) for line in range(3)
    ]  # what the test of one proposal keeps
    assert max(alone[:2]) < kept[0] < kept[1]
    assert alone[2] < kept[1]


def whoever_drew_them(place: int, proposal: Proposal, proposed: Tensor, p: Tensor) -> Tensor:
    """A planted fault: each line is tested by the first one's q."""
    first = proposal.laws[0]
    assert first is not None
    return first[:, place, None].expand(-1, len(proposal.laws), -1)


@pytest.mark.parametrize("params", RULES, ids=["rejection", "tokenwise"])
@pytest.mark.parametrize(
    ("owner", "name", "careless"),
    [(lines, "laws_at", whoever_drew_them), (combs, "NEGLIGIBLE", 1.0)],
    ids=["one q for all lines", "too little is left"],
)
def test_the_enumeration_sees_a_careless_test(
    monkeypatch: pytest.MonkeyPatch, params: SamplingParams, owner: Any, name: str, careless: Any
):
    monkeypatch.setattr(owner, name, careless)
    assert error(drafts(1, 2, 1), 1, params) > 1e-3


def test_the_coupled_walk_is_the_targets_own_picks():
    """Whatever the lines say, what stands and the next token are what the target picks by itself."""
    generator = torch.Generator().manual_seed(1)
    law = drafts(7, 2, 2)
    every = Every(law, 2)
    gumbel = torch.randn(1, 3, V, generator=generator, dtype=torch.float64).expand(len(every.cases), -1, -1)
    u = torch.full((len(every.cases), 4), 0.5, dtype=torch.float64)
    judged = every.judge(torch.arange(len(every.cases)), u, COUPLED, gumbel.contiguous())
    text: tuple[int, ...] = ()
    for index in range(3):
        text += (int((law.target.p[text].log() + gumbel[0, index]).argmax()),)
    for stands, found, drawn in zip(judged.stands, judged.tokens.tolist(), every.tokens.tolist(), strict=True):
        assert tuple(found[: len(stands) + 1]) == text[: len(stands) + 1]
        agree = [next((i for i, token in enumerate(one) if token != text[i]), 2) for one in drawn]
        assert len(stands) == max(agree), "the longest that agrees"
