"""The distribution of what a round commits: the code that runs, over all proposals, verdicts and next tokens.

A random target and a random draft over four tokens, each with a distribution of its own after every prefix. Whatever
stands is continued by the target itself; the joint of K + 1 tokens must be the target's. Only rounding may differ:
1e-12 in float64, and 1e-6 in float32, in which rounds compute.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.acceptance import accept as acceptance
from trt_spec.runtime.acceptance import block_verification
from trt_spec.runtime.state.proposal import Exam, Noise, Proposal
from trt_spec.runtime.state.rows import Rows
from trt_spec.runtime.state.verdict import Verdict

from ...kit.bundles import Pair
from ...kit.faults import fault
from ...kit.sums import adding_in_blocks
from ..states import make_plan, make_rows
from .distributions import EXACT, Models, V, mass_of, random_models, with_exclusions

BLOCK = SamplingParams(temperature=1.0)
TOKENWISE = SamplingParams(temperature=1.0, rule="tokenwise")
SEEDS = range(4)
LEAST = 2.0**-49

Counts = Callable[[tuple[int, ...]], int]  # how many of its tokens a chain proposes


class Case(NamedTuple):
    """One row of the enumeration: a chain, which of its tests pass, and how probable both are."""

    chain: tuple[int, ...]
    count: int
    mass: float
    u: list[float]


def enumerate_round(
    models: Models, chains: dict[tuple[int, ...], float], counts: Counts, k: int, certain: bool, params: SamplingParams
) -> tuple[Tensor, float]:
    """Return the joint of K + 1 tokens after a round, and how many proposals stand on average."""
    each = list(chains)
    u = 0.5 * torch.ones(len(each), k, dtype=torch.float64)
    *_, chances = judge(models, each, [counts(chain) for chain in each], u, certain, [params] * len(each))
    cases = []
    for chain, chance in zip(each, chances.tolist(), strict=True):
        count = counts(chain)
        for passed in product((True, False), repeat=count):
            mass = chains[chain]
            for h, stands in zip(chance, passed, strict=False):
                mass *= h if stands else 1 - h
            near = [h / 2 if stands else (1 + h) / 2 for h, stands in zip(chance, passed, strict=False)]
            if mass > 0:
                cases.append(Case(chain, count, mass, [*near, *[0.5] * (k - count)]))
    u = torch.tensor([case.u for case in cases], dtype=torch.float64).reshape(len(cases), k)
    chosen, numbers = [case.chain for case in cases], [case.count for case in cases]
    accepted, weights, _ = judge(models, chosen, numbers, u, certain, [params] * len(cases))
    begun: Counter[tuple[int, ...]] = Counter()
    for case, stands, following in zip(cases, accepted.tolist(), weights.double(), strict=True):
        for token, share in enumerate((following / following.sum()).tolist()):
            begun[*case.chain[:stands], token] += case.mass * share
    distribution = torch.zeros(*[V] * (k + 1), dtype=torch.float64)
    for tokens, mass in begun.items():
        distribution[tokens] += mass * models.target_after(tokens, k + 1)
    standing = sum(case.mass * stands for case, stands in zip(cases, accepted.tolist(), strict=True))
    return distribution.flatten(), standing


def judge(
    models: Models, chains: Sequence[tuple[int, ...]], counts: Sequence[int], u: Tensor, certain: bool, params
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what stands [A], the weights of the next token [A, V], and the chance of each proposal to pass [A, K]."""
    k = u.shape[1]
    p = torch.stack([torch.stack([models.p[chain[:i]] for i in range(k + 1)]) for chain in chains])
    q = torch.stack([torch.stack([models.q[chain[:i]] for i in range(k)]) for chain in chains])
    rows, plan = make_rows(params, V), make_plan(params, k, ragged=min(counts) < k)
    proposal = Proposal(
        torch.tensor(chains).reshape(len(chains), k), torch.tensor(list(counts)), None if certain else q
    )
    scores, seen = p.log(), []
    verdict = Verdict(scores)
    draw = acceptance.inverse_cdf
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(acceptance, "inverse_cdf", lambda weights, u: (seen.append(weights), draw(weights, u))[1])
        noise = Noise(None, torch.full((len(chains), 1), 0.5, dtype=torch.float64), u)
        acceptance.accept(Exam(proposal, scores, rows, plan, noise, verdict))
    if plan.rejection:
        chances = threshold(verdict.joint.weights[:, 1:], verdict.joint.rests)
    else:
        own = torch.stack([p[:, i].gather(1, proposal.tokens[:, i : i + 1])[:, 0] for i in range(k)], 1)
        theirs = torch.stack([q[:, i].gather(1, proposal.tokens[:, i : i + 1])[:, 0] for i in range(k)], 1)
        chances = (own.double() / (1.0 if certain else theirs.double())).clamp(max=1)
    return verdict.accepted, seen[0], chances


def threshold(weights: Tensor, rests: Tensor) -> Tensor:
    """The uniform up to which a proposal passes, found by asking the code that runs; the least uniform is 2^-49."""
    low, high = torch.zeros_like(weights), torch.ones_like(weights)
    for _ in range(60):
        middle = (low + high) / 2
        passed = block_verification.passes(middle, weights, rests)
        low, high = torch.where(passed, middle, low), torch.where(passed, high, middle)
    return torch.where(low < LEAST, 0.0, low)


def drawn_chains(models: Models, k: int) -> dict[tuple[int, ...], float]:
    every = {chain: mass_of(models.q, chain) for chain in product(range(V), repeat=k)}
    return {chain: mass for chain, mass in every.items() if mass > 0}


def error(models: Models, k: int, counts: Counts | None = None, params: SamplingParams = BLOCK) -> float:
    distribution, _ = enumerate_round(models, drawn_chains(models, k), counts or (lambda chain: k), k, False, params)
    return (distribution - models.target_after((), k + 1).flatten()).abs().max().item()


def kept_on_average(models: Models, k: int, params: SamplingParams) -> float:
    return enumerate_round(models, drawn_chains(models, k), lambda chain: k, k, False, params)[1]


@pytest.mark.parametrize("params", [BLOCK, TOKENWISE], ids=["block", "tokenwise"])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_what_a_round_commits_is_distributed_as_the_targets(k: int, params: SamplingParams):
    for seed in SEEDS:
        assert error(random_models(seed, k, torch.float64), k, params=params) <= EXACT


@pytest.mark.parametrize("k", [2, 3])
def test_filters_that_leave_tokens_out_change_nothing_of_it(k: int):
    for seed in SEEDS:
        assert error(with_exclusions(random_models(seed, k, torch.float64)), k) <= EXACT


@pytest.mark.parametrize("k", [1, 2, 3])
def test_in_float32_only_rounding_differs(k: int):
    for seed in SEEDS:
        assert error(random_models(seed, k, torch.float32), k) <= 1e-6


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sums_that_a_device_makes_in_blocks_change_nothing_of_it(size: int):
    models = random_models(0, 3, torch.float64)
    with adding_in_blocks(size):
        assert error(models, 3) <= EXACT
        assert error(with_exclusions(models), 3) <= EXACT


@pytest.mark.parametrize("spread", [0.0, 12.0])
def test_equal_and_nearly_certain_distributions_are_no_exception(spread: float):
    models = random_models(3, 3, torch.float64, spread)
    assert error(models, 3) <= EXACT
    assert error(Models(models.p, models.p), 3) <= EXACT, "the draft is the target: all stands"


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_a_row_that_proposes_less_than_the_widest_ends_its_own_block(count: int):
    for seed in SEEDS:
        assert error(random_models(seed, 3, torch.float64), 3, lambda chain: count) <= EXACT


def test_how_many_are_proposed_may_depend_on_the_proposals_before():
    """As where the draft's entropy ends them, or the draft rejects a copy."""

    def until_the_first_zero(chain: tuple[int, ...]) -> int:
        return chain.index(0) + 1 if 0 in chain else len(chain)

    for seed in SEEDS:
        assert error(random_models(seed, 3, torch.float64), 3, until_the_first_zero) <= EXACT


def test_how_many_are_proposed_may_not_depend_on_the_first_that_is_left_out():
    """What is left were drawn from another distribution than q, had the token that was drawn behind it a say."""

    def up_to_the_first_zero(chain: tuple[int, ...]) -> int:
        return chain.index(0) if 0 in chain else len(chain)

    assert error(random_models(0, 3, torch.float64), 3, up_to_the_first_zero) > 1e-3


@pytest.mark.parametrize("k", [1, 2, 3])
def test_certain_proposals_are_judged_as_one_by_one(k: int):
    """What is kept, too: a proposal that is certain leaves nothing to gain."""
    for seed in SEEDS:
        models = random_models(seed, k, torch.float64)
        chain = tuple((seed + i) % V for i in range(k))
        found = [
            enumerate_round(models, {chain: 1.0}, lambda chain: k, k, True, params) for params in (BLOCK, TOKENWISE)
        ]
        for distribution, _ in found:
            assert (distribution - models.target_after((), k + 1).flatten()).abs().max() <= EXACT
        assert found[0][1] == pytest.approx(found[1][1], abs=EXACT)


def test_a_block_never_keeps_less_than_one_by_one_and_more_on_average():
    gains = []
    for k, seed in product((1, 2, 3), SEEDS):
        models = random_models(seed, k, torch.float64)
        kept = [kept_on_average(models, k, params) for params in (BLOCK, TOKENWISE)]
        assert kept[0] >= kept[1] - EXACT
        if k == 1:
            assert kept[0] == pytest.approx(kept[1], abs=EXACT)
        gains.append(kept[0] / kept[1])
    assert sum(gains) / len(gains) > 1.02


def test_at_least_i_stand_with_the_probability_of_their_weight():
    """Whatever K: so one survival curve tells what each K yields."""
    models = random_models(1, 3, torch.float64)
    kept = {k: kept_on_average(models, k, BLOCK) for k in (1, 2, 3)}
    survival = [0.0, 0.0, 0.0]
    for chain, mass in drawn_chains(models, 3).items():
        weight = 1.0
        for i, token in enumerate(chain):
            weight = min(1.0, weight * (models.p[chain[:i]][token] / models.q[chain[:i]][token]).item())
            survival[i] += mass * weight
    for k, standing in kept.items():
        assert standing == pytest.approx(sum(survival[:k]), abs=EXACT)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("block ended by its first failure", 3),
        ("block test without its denominator", 3),
        ("one end for all blocks", 2),
        ("skipped residual", 3),
    ],
)
def test_the_enumeration_sees_a_planted_fault(name: str, count: int):
    models = random_models(0, 3, torch.float64)
    assert error(models, 3, lambda chain: count) <= EXACT
    with fault(name):
        assert error(models, 3, lambda chain: count) > 1e-4


def test_the_enumeration_sees_a_residual_without_the_blocks_weight(monkeypatch: pytest.MonkeyPatch):
    """It moves a hundredth of the mass or less, for which χ² would take tens of thousands of samples."""
    residual = acceptance.residual
    monkeypatch.setattr(
        acceptance, "residual", lambda proposal, target, accepted, share: residual(proposal, target, accepted)
    )
    assert error(random_models(0, 3, torch.float64), 3) > 1e-4


def test_rounds_of_a_request_never_share_a_draw(eight: Pair, monkeypatch: pytest.MonkeyPatch):
    """Also those that a block discarded: noise is keyed by where a round begins, and each begins behind the last."""
    begun, numbers, uniforms = [], [], Rows.round_uniforms

    def seen(rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
        found = uniforms(rows)
        begun.extend(rows.length.tolist())
        numbers.extend(part.flatten().clone() for part in found[:2])
        return found

    monkeypatch.setattr(Rows, "round_uniforms", seen)
    with Decoder.open(eight.bundle) as decoder:
        params = SamplingParams(temperature=1.0, seed=4, max_new_tokens=30, ignore_eos=True)
        [output] = decoder.generate([[2, 2]], params, draft_length=3)
    assert 0 < output.speculation.accepted < output.speculation.proposed
    assert begun == sorted(set(begun)), "no two rounds begin at one length"
    every = torch.cat(numbers)
    assert len(every.unique()) == len(every)


# Verdicts that can be forced.


def verdict_on(params, chains, u, *, certain=False, counts=None, models=None):
    models = models or random_models(5, len(chains[0]), torch.float32)
    uniforms = torch.as_tensor(u, dtype=torch.float64).expand(len(chains), len(chains[0]))
    return judge(models, chains, counts or [len(chains[0])] * len(chains), uniforms, certain, params)


def test_rules_of_one_batch_do_not_disturb_each_other():
    """Each row has the verdict and the weights that it has alone, whatever the neighbours' rule, K or drafter is."""
    chains = list(product(range(V), repeat=3))
    generator = torch.Generator().manual_seed(1)
    u = torch.rand(len(chains), 3, dtype=torch.float64, generator=generator)
    alone = {
        params.rule: verdict_on([params] * len(chains), chains, u, counts=[3 - i % 3 for i in range(len(chains))])
        for params in (BLOCK, TOKENWISE)
    }
    both = [BLOCK, TOKENWISE] * len(chains)
    twice = [chain for chain in chains for _ in both[:2]]
    counts = [3 - i % 3 for i in range(len(chains)) for _ in both[:2]]
    accepted, weights, _ = verdict_on(both, twice, u.repeat_interleave(2, 0), counts=counts)
    for start, rule in enumerate(alone):
        assert torch.equal(accepted[start::2], alone[rule][0])
        assert torch.equal(weights[start::2], alone[rule][1])
    assert not torch.equal(alone["rejection"][0], alone["tokenwise"][0])


def test_certain_proposals_have_the_same_bits_beside_sampled_ones():
    """A neighbour's q makes theirs a table that is one at the proposal."""
    chains = list(product(range(V), repeat=3))
    models = random_models(7, 3, torch.float32)
    generator = torch.Generator().manual_seed(2)
    u = torch.rand(len(chains), 3, dtype=torch.float64, generator=generator)
    for chain, one in zip(chains, u, strict=True):
        told = Models(models.p, {chain[:i]: torch.eye(V)[chain[i]] for i in range(3)})
        for a, b in zip(
            verdict_on([BLOCK], [chain], one, certain=True, models=told),
            verdict_on([BLOCK], [chain], one, certain=False, models=told),
            strict=True,
        ):
            assert torch.equal(a, b)


def test_a_later_proposal_that_passes_saves_an_earlier_one_that_failed():
    p, q = torch.tensor([0.1, 0.1, 0.7, 0.1]), torch.tensor([0.4, 0.4, 0.1, 0.1])
    prefixes = [prefix for length in range(3) for prefix in product(range(V), repeat=length)]
    models = Models(dict.fromkeys(prefixes, p), dict.fromkeys(prefixes, q))
    unlikely = 1 - 1e-9
    accepted, weights, _ = verdict_on([BLOCK, TOKENWISE], [(0, 2)] * 2, unlikely, models=models)
    assert accepted.tolist() == [2, 0], "p / q is a quarter, then seven: the weight is one again"
    torch.testing.assert_close(weights[0] / weights[0].sum(), p)


def test_a_proposal_whose_q_is_rounded_to_nothing_is_accepted_if_the_target_may_say_it():
    models = random_models(4, 2, torch.float32)
    models.q[()] = torch.tensor([0.0, 0.0, 0.5, 0.5])
    models.p[()] = torch.tensor([0.0, 1e-9, 0.5, 0.5])
    accepted, *_ = verdict_on([BLOCK] * 2, [(0, 1), (1, 1)], 1 - 1e-9, models=models)
    assert accepted[0] == 0
    assert accepted[1] >= 1


def test_nothing_behind_a_token_that_the_target_excludes_ever_stands():
    models = random_models(4, 3, torch.float32)
    models.p[(1,)] = torch.tensor([0.0, 0.25, 0.5, 0.25])
    for u in (2.0**-49, 1e-9, 0.5):
        accepted, *_ = verdict_on([BLOCK] * V, [(1, 0, last) for last in range(V)], u, models=models)
        assert accepted.max() <= 1


def test_a_distribution_that_is_no_numbers_is_drawn_from_where_it_is_reached_one_by_one():
    """So that the error is raised in the same round; nothing behind it stands."""
    models = random_models(4, 3, torch.float32)
    models.p[(1,)] = torch.full((V,), torch.nan)
    for u, reached in ((1e-9, True), (1 - 1e-9, models.p[()][1] >= models.q[()][1])):
        accepted, weights, _ = verdict_on([BLOCK], [(1, 0, 2)], u, models=models)
        assert accepted.tolist() == [int(reached)]
        assert weights.isnan().any().item() == bool(reached)
