"""The tokens that leave the real Decoder are distributed exactly as the target alone distributes them.

Pearson's χ² of the joint distribution of the first K + 2 tokens against the exact one, which transformers computes in
float64 over every prefix of a vocabulary of 8 tokens. A correct implementation fails one in a million times over the
choice of the seeds (FALSE_ALARM); the seeds are fixed, so a test that passed keeps passing. Planted faults must be
caught by the same statistic at the same threshold.
"""

import importlib
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from trt_spec.runtime import Decoder, EntropyRule, SamplingParams
from trt_spec.runtime.acceptance.filters import Cut

from ..kit.bundles import Pair
from ..kit.chi_squared import draw, p_value, p_value_of
from ..kit.exact import EVERYTHING, FILTERED, PENALISED, PLAIN, PROMPT, SETTINGS, exact_distribution
from ..kit.sampled import FALSE_ALARM
from ..kit.steps import feed
from .states import make_plan, make_rows

acceptance = importlib.import_module("trt_spec.runtime.acceptance.accept")
drafters = importlib.import_module("trt_spec.runtime.round.propose")
suffix = importlib.import_module("trt_spec.runtime.drafters.suffix")
round_ = importlib.import_module("trt_spec.runtime.round.round")

SAMPLES = 10_000
COOL_TOP_3 = SamplingParams(temperature=0.9, top_k=3)


def test_output_is_distributed_as_the_target_alone(eight: Pair):
    """Fewer samples than in the exhaustive tier."""
    assert p_value_of(eight, replace(FILTERED, rule="rejection"), 6_000, 2, depth=3) > FALSE_ALARM


@pytest.mark.exhaustive
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_an_output_that_may_not_end_early_is_distributed_as_the_targets(eight: Pair, rule: str):
    """The ban ends inside a round: the fourth token may be one that those before it may not."""
    params = replace(PENALISED, min_tokens=3, stop_token_ids=[3, 5], rule=rule)
    assert p_value_of(eight, params, 4_000, 2, depth=3) > FALSE_ALARM


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("settings", "rule", "drafter", "k"),
    [
        ("filtered", "rejection", "model", 2),
        ("plain", "rejection", "model", 2),
        ("everything", "rejection", "model", 3),
        ("everything", "tokenwise", "model", 2),
        ("filtered", "tokenwise", "model", 2),
        ("plain", "tokenwise", "lookup", 2),
        ("plain", "coupled", "lookup", 2),
        ("filtered", "coupled", "model", 1),
        ("min-p", "rejection", "lookup", 1),
        ("penalised", "rejection", "model", 1),
        ("everything", "coupled", "model", 2),
        ("everything", "rejection", "lookup", 2),
        ("plain", "rejection", "mixed", "auto"),
        ("plain", "rejection", "model", "auto"),
        ("plain", "rejection", "model", EntropyRule(shortest=0, longest=3, smoothing=0.0, stop_above=0.93)),
    ],
)
def test_output_is_distributed_as_the_target_alone_under_all_settings(
    eight: Pair, settings: str, rule: str, drafter: str, k: int | str | EntropyRule
):
    assert p_value_of(eight, replace(SETTINGS[settings], rule=rule), SAMPLES, k, drafter) > FALSE_ALARM


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("settings", "rule", "drafter"),
    [
        ("filtered", "rejection", "ngram"),
        ("everything", "coupled", "ngram"),
        ("everything", "rejection", "random"),
        ("penalised", "rejection", "suffix"),
        ("everything", "rejection", "cascade"),
        ("filtered", "coupled", "cascade"),
    ],
)
def test_other_drafts_are_lossless(eight: Pair, settings: str, rule: str, drafter: str):
    assert p_value_of(eight, replace(SETTINGS[settings], rule=rule), 6_000, 2, drafter, depth=3) > FALSE_ALARM


@pytest.mark.exhaustive
def test_proposals_from_earlier_outputs_are_lossless(eight: Pair, monkeypatch: pytest.MonkeyPatch):
    """Of requests that chose no seed: noise that made an earlier output never judges it."""
    monkeypatch.setattr("secrets.randbits", random.Random(1).getrandbits)
    params = replace(FILTERED, max_new_tokens=3, ignore_eos=True)
    observed = Counter()
    with Decoder.open(eight.bundle, max_batch=32) as decoder:
        for _ in range(60):
            outputs = decoder.generate([PROMPT] * 32, params, draft_length=2, drafter="suffix")
            observed.update(output.token_ids[1:] for output in outputs)
        assert 0 < decoder.speculation.accepted < decoder.speculation.examined
    assert p_value(observed, exact_distribution(eight.exact, params, 2)) > FALSE_ALARM


# Negative controls, beside those that the certificate plants (tests/tools/certificate/test_faults.py): the same
# statistic sees a fault in the code that runs. Two tokens of 2,000 samples are enough.


def p_value_with_the_fault(pair: Pair, params: SamplingParams, drafter: str = "model") -> float:
    return p_value_of(pair, params, 2_000, k=1, drafter=drafter, depth=2)


def without_filters(plan):
    return replace(plan, filters=tuple(one for one in plan.filters if not isinstance(one, Cut)))


@pytest.mark.exhaustive
def test_the_controls_pass_without_a_fault(eight: Pair):
    assert p_value_with_the_fault(eight, PLAIN) > FALSE_ALARM


def test_chi_squared_catches_a_q_declared_filtered_of_a_draft_that_sampled_unfiltered(
    eight: Pair, monkeypatch: pytest.MonkeyPatch
):
    """Pitfalls 2 and 3."""
    sample, weights = drafters.inverse_cdf, {}

    def transform(logits, rows, plan, ahead):
        weights["true"] = round_.transform(logits, rows, without_filters(plan), ahead).softmax(-1)[:, 0]
        return round_.transform(logits, rows, plan, ahead)

    monkeypatch.setattr(drafters, "draft_transform", transform)
    monkeypatch.setattr(drafters, "inverse_cdf", lambda _, u: sample(weights["true"], u))
    assert p_value_with_the_fault(eight, COOL_TOP_3) < FALSE_ALARM


@pytest.mark.exhaustive
def test_chi_squared_catches_a_filter_after_the_subtraction(eight: Pair, monkeypatch: pytest.MonkeyPatch):
    """Pitfall 3: the residual is formed of unfiltered p and q and its unlikely tokens are cut off only then."""
    residual, transform, seen = acceptance.residual, round_.transform, {}

    def unfiltered(logits, rows, plan, ahead):
        seen["kept"] = transform(logits, rows, plan, ahead).isfinite()
        return transform(logits, rows, without_filters(plan), ahead)

    def filtered_late(proposal, target, accepted, lenience):
        kept = acceptance.pick(seen["kept"], accepted)
        return residual(proposal, target, accepted) * kept + 1e-30 * kept

    monkeypatch.setattr(drafters, "draft_transform", unfiltered)
    monkeypatch.setattr(round_, "transform", unfiltered)
    monkeypatch.setattr(acceptance, "residual", filtered_late)
    assert p_value_with_the_fault(eight, FILTERED) < FALSE_ALARM


@pytest.mark.exhaustive
@pytest.mark.parametrize("read", [True, False])
def test_chi_squared_catches_proposals_made_by_the_noise_that_judges_them(
    eight: Pair, monkeypatch: pytest.MonkeyPatch, read: bool
):
    """A request again with the same seed, beside what it said before; no fault where it does not read that."""
    if read:
        monkeypatch.setattr(suffix, "reads_pool", lambda params: True)
    observed = Counter()
    with Decoder.open(eight.bundle, max_batch=1) as decoder:
        for seed in range(300):
            params = replace(PLAIN, max_new_tokens=3, ignore_eos=True, seed=seed)
            decoder.forget_outputs()
            _, again = (decoder.generate(PROMPT, params, draft_length=2, drafter="suffix")[0] for _ in range(2))
            observed[again.token_ids[1:]] += 1
    found = p_value(observed, exact_distribution(eight.exact, PLAIN, 2))
    assert found < FALSE_ALARM if read else found > FALSE_ALARM


@pytest.mark.parametrize(
    "drafter", ["suffix", *(pytest.param(one, marks=pytest.mark.exhaustive) for one in ("ngram", "cascade"))]
)
def test_drafts_that_cost_less_than_a_model_are_lossless(eight: Pair, drafter: str):
    assert p_value_of(eight, replace(EVERYTHING, draft_temperature=0.5), 2_000, 2, drafter, depth=2) > FALSE_ALARM


@pytest.mark.exhaustive
def test_what_a_cascade_proposes_first_is_distributed_as_the_drafts_output(eight: Pair):
    """By the draft's own scores in float32, which 2,000 samples cannot tell from exact ones."""
    params = replace(FILTERED, max_new_tokens=2, ignore_eos=True)
    with Decoder.open(eight.bundle, max_batch=256) as decoder:
        requests = [
            decoder.submit(PROMPT, replace(params, seed=seed), draft_length=2, drafter="cascade", trace=True)
            for seed in range(2_000)
        ]
        while decoder.step():
            pass
        after = [feed(decoder.draft, 0, [*PROMPT, first], 0) for first in range(8)]
    rows = make_rows([params] * 8, 8)
    q = round_.transform(torch.stack(after)[:, None], rows, make_plan([params] * 8), None).softmax(-1)[:, 0]
    firsts = Counter(request.token_ids[0] for request in requests)
    expected = {(a, b): firsts[a] / len(requests) * q[a, b].item() for a in firsts for b in range(8)}
    observed = Counter((request.token_ids[0], request.trace[1].proposal[0]) for request in requests)
    assert {len(request.trace[1].proposal) for request in requests} == {1, 2}, "the copy stands or falls"
    assert p_value(observed, expected) > FALSE_ALARM  # given the first tokens, which take seven degrees of freedom


@pytest.mark.exhaustive
def test_a_draft_that_proposes_its_best_token_to_a_request_that_samples_is_lossless(eight: Pair):
    """It samples from another distribution than the target, and says so."""
    assert p_value_with_the_fault(eight, replace(FILTERED, draft_temperature=0)) > FALSE_ALARM


@pytest.mark.exhaustive
@pytest.mark.parametrize(("rule", "draft_temperature"), [("rejection", 0.6), ("rejection", 2.0), ("coupled", 0)])
def test_a_draft_with_a_temperature_of_its_own_is_lossless(eight: Pair, rule: str, draft_temperature: float):
    params = replace(EVERYTHING, rule=rule, draft_temperature=draft_temperature)
    assert p_value_of(eight, params, 6_000, k=2, depth=3) > FALSE_ALARM


@pytest.mark.parametrize(("drafter", "k"), [("model", 1), ("model", "1+3"), ("model", "2x1"), ("model+random", 1)])
def test_under_lenience_no_token_is_likelier_than_its_bound_and_the_loss_is_seen(eight: Pair, drafter: str, k: object):
    """At most p / l in 1,500 samples of the first token, 4.9 standard deviations allowed: one false alarm in a million.

    The statistic that passes whatever is lossless must not pass this.
    """
    lenience, samples = 0.4, 1_500
    params = replace(PLAIN, lenience=lenience)
    observed, exact = draw(eight, params, samples, k, drafter, 1), exact_distribution(eight.exact, params, 1)
    for token, p in exact.items():
        bound = min(p / lenience, 1)
        assert observed[token] / samples <= bound + 4.9 * (bound * (1 - bound) / samples) ** 0.5
    assert p_value(observed, exact) < FALSE_ALARM
