"""All rules on scripted p and q: every verdict that can be forced, and the distribution where chance decides."""

import pytest
import torch
from scipy.stats import chisquare
from trt_spec.runtime import SamplingParams
from trt_spec.runtime.acceptance.accept import accept, flag_no_numbers, residual
from trt_spec.runtime.acceptance.sums import inverse_cdf
from trt_spec.runtime.state.noise import gumbels, uniforms
from trt_spec.runtime.state.proposal import Exam, Noise, Proposal
from trt_spec.runtime.state.verdict import Verdict, Winners
from trt_spec.tools.theory.lines import lenient_acceptance

from ..states import log, make_plan, make_rows

GREEDY = SamplingParams()
REJECTION = SamplingParams(temperature=1.0)
TOKENWISE = SamplingParams(temperature=1.0, rule="tokenwise")
COUPLED = SamplingParams(temperature=1.0, rule="coupled")
P = [0.1, 0.2, 0.3, 0.4]
Q = [0.4, 0.3, 0.2, 0.1]
LIKELY, UNLIKELY = 1e-9, 1 - 1e-9  # uniforms that accept whatever can be accepted, and whatever must be


def judge(params, scores, tokens, q=None, counts=None, u=0.5, draw=0.5, gumbel=None):
    """One round of `tokens` [A, K]; `u` and `draw` for all positions, or [A][K+1]."""
    tokens = torch.tensor(tokens, dtype=torch.int64).reshape(len(params), -1)
    k = tokens.shape[1]
    rows = make_rows(params, scores.shape[2])
    counts = torch.tensor(counts) if counts is not None else torch.full((len(params),), k)
    probabilities = None if q is None else torch.tensor(q).expand(len(params), k, -1)
    fill = lambda value: torch.as_tensor(value, dtype=torch.float64).expand(len(params), k + 1)  # noqa: E731
    plan = make_plan(params, k, ragged=bool((counts < k).any()))
    noise = Noise(gumbel, *((fill(draw), fill(u)) if plan.draws else (None, None)))
    return verdict_of(Proposal(tokens, counts, probabilities), scores, rows, plan, noise)


def verdict_of(proposal, scores, rows, plan, noise):
    verdict = Verdict(scores.contiguous())
    accept(Exam(proposal, scores.contiguous(), rows, plan, noise, verdict))
    verdict.next_token = verdict.tokens.gather(1, verdict.next_index)[:, 0]
    kept = torch.arange(plan.draft_length) < verdict.accepted[:, None]
    assert torch.equal(verdict.tokens[:, :-1][kept], proposal.tokens[kept]), "what stands is what was proposed"
    return verdict


def winners(scores, gumbel):
    picked = Winners(scores, torch.zeros(scores.shape[:2], dtype=torch.int64))
    picked.pick(scores, gumbel)
    return picked.tokens


def repeated(rows: int, positions: int, *probabilities: float) -> torch.Tensor:
    return log(*probabilities).expand(rows, positions, -1)


def test_greedy_accepts_while_proposals_are_the_best_tokens():
    scores = torch.zeros(4, 3, 4)
    for position, best in enumerate((2, 0, 3)):
        scores[:, position, best] = 1
    verdict = judge([GREEDY] * 4, scores, [[2, 0], [2, 1], [1, 0], [1, 1]])
    assert verdict.accepted.tolist() == [2, 1, 0, 0]
    assert verdict.next_token.tolist() == [3, 0, 2, 2]


@pytest.mark.parametrize("params", [REJECTION, TOKENWISE])
def test_rejection_accepts_all_that_the_target_likes_at_least_as_much(params: SamplingParams):
    verdict = judge([params] * 2, repeated(2, 4, *P), [[3, 2, 3], [2, 2, 2]], q=Q, u=UNLIKELY, draw=[[0.05], [0.95]])
    assert verdict.accepted.tolist() == [3, 3]
    assert verdict.next_token.tolist() == [0, 3], "with all accepted the next token is drawn from p itself"


@pytest.mark.parametrize("params", [REJECTION, TOKENWISE])
def test_rejection_refuses_what_the_target_excludes_however_the_dice_fall(params: SamplingParams):
    scores = repeated(1, 3, 0.5, 0.5, 0.0, 0.0)
    verdict = judge([params], scores, [[2, 0]], q=[0.0, 0.0, 1.0, 0.0], u=LIKELY)
    assert verdict.accepted.tolist() == [0]
    assert verdict.next_token.tolist() in ([0], [1])


@pytest.mark.parametrize("params", [REJECTION, TOKENWISE])
def test_rejection_tests_u_times_q_against_p(params: SamplingParams):
    """p / q of token 0 is 0.25: accepted below, rejected from there on."""
    for u, accepted in ((0.2499, 1), (0.2501, 0)):
        assert judge([params], repeated(1, 2, *P), [[0]], q=Q, u=u).accepted.tolist() == [accepted]


def test_after_a_rejection_the_next_token_is_drawn_from_what_p_has_beyond_q():
    """max(0, p − q) = 0, 0, .1, .3: a quarter of the draws is 2, the rest 3."""
    for draw, token in ((0.01, 2), (0.24, 2), (0.26, 3), (0.99, 3)):
        verdict = judge([TOKENWISE], repeated(1, 3, *P), [[0, 3]], q=Q, u=UNLIKELY, draw=draw)
        assert (verdict.accepted.item(), verdict.next_token.item()) == (0, token)


def test_rows_accept_different_numbers_in_one_batch():
    """Pitfall 6; each row's next token is drawn after its own accepted proposals."""
    scores = torch.stack([log(1.0, 0.0, 0.0), log(0.0, 1.0, 0.0), log(0.0, 0.0, 1.0)]).expand(4, 3, 3)
    tokens = [[0, 1], [0, 2], [1, 1], [0, 1]]
    for params in (GREEDY, REJECTION, TOKENWISE, COUPLED):
        verdict = judge([params] * 4, scores, tokens, gumbel=torch.zeros(4, 3, 3))
        assert verdict.accepted.tolist() == [2, 1, 0, 2]
        assert verdict.next_token.tolist() == [2, 1, 0, 2]


def test_a_row_takes_no_more_proposals_than_it_asked_for():
    """K differs by row: what the widest row makes the others propose is never examined."""
    for params in (GREEDY, REJECTION, TOKENWISE, COUPLED):
        verdict = judge(
            [params] * 3, repeated(3, 4, 0.0, 1.0), [[1, 1, 1]] * 3, counts=[0, 1, 3], gumbel=torch.zeros(3, 4, 2)
        )
        assert verdict.accepted.tolist() == [0, 1, 3]
        assert verdict.next_token.tolist() == [1, 1, 1]


@pytest.mark.parametrize("params", [REJECTION, TOKENWISE])
def test_beyond_its_own_proposals_a_row_draws_from_p_not_from_a_residual(params: SamplingParams):
    verdict = judge([params], repeated(1, 3, *P), [[3, 0]], q=Q, counts=[1], u=LIKELY, draw=0.05)
    assert verdict.accepted.tolist() == [1]
    assert verdict.next_token.tolist() == [0], "token 0 has no residual, so it can only come from p"


@pytest.mark.parametrize("params", [GREEDY, REJECTION, TOKENWISE, COUPLED])
def test_without_proposals_a_round_is_plain_decoding(params: SamplingParams):
    verdict = judge([params], repeated(1, 1, *P), [[]], draw=0.2, gumbel=torch.zeros(1, 1, 4))
    assert verdict.accepted.tolist() == [0]
    assert verdict.next_token.tolist() == [1 if params in (REJECTION, TOKENWISE) else 3]


def test_an_empty_residual_draws_from_p():
    """Pitfall 4: p equal to q leaves nothing to draw from; nothing is divided by it."""
    proposal = Proposal(torch.tensor([[1]]), torch.tensor([1]), torch.tensor([[P]]))
    remaining = residual(proposal, torch.tensor([[P, P]]), torch.tensor([0]))
    assert torch.equal(remaining / remaining.sum(), torch.tensor([P]))


def test_a_token_without_residual_is_never_drawn_beside_one_that_has_some():
    """Not even where rounding left the least there is to draw from, and the uniform is its smallest."""
    p, q = torch.tensor([[0.5, 0.5 - 2.0**-25]]), torch.tensor([[[0.5, 0.5 - 2.0**-24]]])
    weights = residual(
        Proposal(torch.tensor([[0]]), torch.tensor([1]), q), p[:, None].expand(1, 2, 2), torch.tensor([0])
    )
    assert inverse_cdf(weights, torch.tensor([[2.0**-49]], dtype=torch.float64)).tolist() == [[1]]


@pytest.mark.parametrize("params", [REJECTION, TOKENWISE])
def test_equal_p_and_q_accept_whatever_the_uniform(params: SamplingParams):
    assert judge([params], repeated(1, 3, *P), [[0, 3]], q=P, u=1 - 2.0**-40).accepted.tolist() == [2]


@pytest.mark.parametrize("params", [REJECTION, TOKENWISE])
def test_a_certain_proposal_is_accepted_with_probability_p_and_never_drawn_after_its_rejection(params: SamplingParams):
    """Pitfall 2: its q is one on it."""
    scores = repeated(1, 2, *P)
    for u, accepted in ((0.29, 1), (0.31, 0)):
        assert judge([params], scores, [[2]], u=u).accepted.tolist() == [accepted]
    drawn = {judge([params], scores, [[2]], u=UNLIKELY, draw=draw / 50).next_token.item() for draw in range(50)}
    assert drawn == {0, 1, 3}


@pytest.mark.parametrize("params", [REJECTION, TOKENWISE])
def test_a_certain_proposal_the_target_is_certain_of_is_always_accepted(params: SamplingParams):
    assert judge([params], repeated(1, 2, 0.0, 1.0), [[1]], u=1 - 2.0**-49).accepted.tolist() == [1]


def test_ties_go_to_the_lowest_id_in_proposal_and_verdict_alike():
    scores = torch.tensor([[[0.0, 1.0, 1.0, 1.0], [2.0, 2.0, 0.0, 0.0]]])
    assert winners(scores, None).tolist() == [[1, 0]]
    assert winners(scores, torch.zeros(1, 2, 4)).tolist() == [[1, 0]]
    assert judge([GREEDY] * 2, scores.expand(2, -1, -1), [[1], [2]]).accepted.tolist() == [1, 0]


def test_rules_may_mix_in_a_batch():
    scores = repeated(3, 2, *P)
    verdict = judge([GREEDY, REJECTION, COUPLED], scores, [[3], [3], [3]], q=Q, u=LIKELY, gumbel=torch.zeros(3, 2, 4))
    assert verdict.accepted.tolist() == [1, 1, 1]
    noise = torch.zeros(3, 2, 4)
    noise[2, :, 0] = 9
    verdict = judge([GREEDY, REJECTION, COUPLED], scores, [[3], [0], [3]], q=Q, u=UNLIKELY, gumbel=noise)
    assert verdict.accepted.tolist() == [1, 0, 0]
    assert verdict.next_token[0] == 3
    assert verdict.next_token[1] in (2, 3)
    assert verdict.next_token[2] == 0


def test_inverse_cdf_never_draws_a_token_without_weight():
    weights = torch.tensor([[0.0, 0.0, 1e-20, 0.0, 2e-20, 0.0]])
    for u, token in ((2.0**-49, 2), (0.33, 2), (0.34, 4), (1 - 2.0**-49, 4)):
        assert inverse_cdf(weights, torch.tensor([[u]], dtype=torch.float64)).tolist() == [[token]]


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("params", [REJECTION, TOKENWISE, COUPLED])
def test_the_first_token_is_distributed_as_p(params: SamplingParams, certain: bool):
    """200,000 rounds through accept(); χ² with a false alarm of 1e-6 over seeds, and the seed is fixed."""
    count, vocab = 200_000, 4
    seed = torch.stack([torch.arange(count), torch.full((count,), 5)], 1)
    pair = uniforms(seed[0], torch.arange(count), 2)  # one seed, one round at each length
    noise = gumbels(seed, torch.full((count, 2), 9) + torch.arange(2), vocab) if params is COUPLED else None
    q = torch.tensor([Q]).expand(count, 1, -1)
    if certain:
        tokens = torch.full((count, 1), 2)
    elif params is COUPLED:
        tokens = winners(q.log(), noise[:, :1])
    else:
        tokens = inverse_cdf(q[:, 0], pair[:, 0, :1])
    rows = make_rows([params], vocab)
    rows = rows._each(lambda tensor: tensor.expand(count, *tensor.shape[1:]))
    verdict = verdict_of(
        Proposal(tokens, torch.ones(count, dtype=torch.int64), None if certain else q),
        log(*P).expand(count, 2, -1),
        rows,
        make_plan([params], 1),
        Noise(noise, *((None, None) if params is COUPLED else pair.unbind(-1))),
    )
    first = torch.where(verdict.accepted > 0, tokens[:, 0], verdict.next_token)
    observed = torch.bincount(first, minlength=vocab)
    assert chisquare(observed, torch.tensor(P, dtype=torch.float64) * count).pvalue > 1e-6
    rate = verdict.accepted.float().mean().item()
    overlap = P[2] if certain else sum(map(min, P, Q))  # 0.6
    if params is not COUPLED or certain:
        assert rate == pytest.approx(overlap, abs=4.9 * (overlap * (1 - overlap) / count) ** 0.5)
    else:
        assert overlap > rate > overlap - 0.15, "coupled accepts a little less often"
    after = verdict.next_token[verdict.accepted > 0]
    observed = torch.bincount(after, minlength=vocab)
    assert chisquare(observed, torch.tensor(P, dtype=torch.float64) * len(after)).pvalue > 1e-6


@pytest.mark.parametrize("at", ["first", "last"])
def test_a_next_token_drawn_from_nan_is_flagged_and_kept_in_the_vocabulary(at: str):
    """What the rejection rule draws from NaN lies beyond the vocabulary; argmax picks the NaN itself."""
    logits = torch.zeros(3, 2, 5)
    logits[1:, 0, 0 if at == "first" else -1] = torch.nan
    verdict = Verdict(logits)
    verdict.proposed.fill_(1)
    verdict.tokens[:, 0] = torch.tensor([3, 5, 0 if at == "first" else 4])
    flag_no_numbers(logits, verdict)
    assert verdict.proposed.tolist() == [1, -1, -1]
    assert verdict.tokens.max() < 5


# Lenience.


@pytest.mark.parametrize("lenience", [1.0, 0.9, 0.5, 0.1, 1e-3])
def test_under_lenience_no_token_becomes_likelier_than_p_over_l(lenience: float):
    """The whole distribution of the token that comes out, put together from the verdicts and the residual of the code
    that runs; float32 rounding allows 1e-6, and each threshold of u is met within 1e-5 of itself."""
    generator = torch.Generator().manual_seed(1)
    params = SamplingParams(temperature=1.0, rule="tokenwise", lenience=lenience)
    for spread in (0.3, 1.0, 3.0) * 10:
        p, q = (spread * torch.randn(2, 6, generator=generator)).softmax(-1)
        accepted = (p / (lenience * q)).clamp(max=1)
        tokens = torch.arange(6)[:, None].tolist()
        scores = p.log().expand(6, 2, 6)
        below, above = ((accepted * near)[:, None].double() for near in (1 - 1e-5, 1 + 1e-5))
        assert judge([params] * 6, scores, tokens, q=q.tolist(), u=below).accepted.tolist() == [1] * 6
        passed = judge([params] * 6, scores, tokens, q=q.tolist(), u=above).accepted
        assert passed.tolist() == (accepted == 1).long().tolist()
        remaining = residual(
            Proposal(torch.tensor([[0]]), torch.tensor([1]), q.expand(1, 1, 6)),
            p.expand(1, 2, 6),
            torch.tensor([0]),
            torch.tensor([lenience]),
        )[0]
        alpha = (q * accepted).sum()
        assert alpha.item() == pytest.approx(lenient_acceptance(p.tolist(), q.tolist(), lenience), abs=1e-6)
        output = q * accepted + (1 - alpha) * remaining / remaining.sum()
        assert output.sum().item() == pytest.approx(1, abs=1e-6)
        assert (output <= p / lenience + 1e-6).all()
        if lenience == 1:
            torch.testing.assert_close(output, p, atol=1e-6, rtol=0)


def test_lenience_lets_a_greedy_row_keep_what_is_nearly_as_likely_as_the_best():
    """The best has .4: with l = .7 a token of .3 stands, one of .2 does not; the next token is the best."""
    lenient = SamplingParams(lenience=0.7)
    for token, accepted in ((3, 1), (2, 1), (1, 0)):
        verdict = judge([lenient, GREEDY], repeated(2, 2, *P), [[token]] * 2)
        assert verdict.accepted.tolist() == [accepted, int(token == 3)]
        assert verdict.next_token.tolist() == [3, 3]


@pytest.mark.parametrize("lenience", [0.5, 1e-300])
def test_lenience_accepts_nothing_that_the_request_excludes(lenience: float):
    params = [SamplingParams(lenience=lenience), SamplingParams(temperature=1.0, lenience=lenience)]
    verdict = judge(params, repeated(2, 2, 0.5, 0.5, 0.0, 0.0), [[3], [3]], u=LIKELY)
    assert verdict.accepted.tolist() == [0, 0]


def test_lenience_is_of_one_row():
    q = [0.1, 0.1, 0.1, 0.7]
    mild, strict = SamplingParams(temperature=1.0, lenience=0.5), SamplingParams(temperature=1.0)
    verdict = judge([mild, strict, COUPLED], repeated(3, 2, *P), [[3]] * 3, q=q, u=0.9, gumbel=torch.zeros(3, 2, 4))
    assert verdict.accepted.tolist() == [1, 0, 1], "p / q is .57, p / (l·q) more than one, and 3 the likeliest"
