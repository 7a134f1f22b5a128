"""The tokens that leave the real Decoder are distributed exactly as the target alone distributes them.

Pearson's χ² of the joint distribution of the first K + 2 tokens against the exact one, which transformers computes in
float64 over every prefix of a vocabulary of 8 tokens. A correct implementation fails one in a million times over the
choice of the seeds (FALSE_ALARM); the seeds are fixed, so a test that passed keeps passing. Planted faults must be
caught by the same statistic at the same threshold.
"""

import importlib
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.tools.certificate.chi_squared import statistic, tail

from ..bundles import Pair

acceptance = importlib.import_module("trt_spec.runtime.acceptance")
drafters = importlib.import_module("trt_spec.runtime.drafters")
round_ = importlib.import_module("trt_spec.runtime.round")

FALSE_ALARM = 1e-6
PROMPT = [2, 2]  # repeats, so that lookup has something to copy in the first round
PLAIN = SamplingParams(temperature=1.0)
FILTERED = SamplingParams(temperature=1.3, top_k=6, top_p=0.9)
COOL_TOP_3 = SamplingParams(temperature=0.9, top_k=3)
MIN_P = SamplingParams(temperature=0.8, min_p=0.1)
PENALISED = SamplingParams(
    temperature=1.0,
    repetition_penalty=1.4,
    presence_penalty=0.5,
    frequency_penalty=0.4,
    logit_bias={4: 0.8, 6: -1.0},
)
EVERYTHING = replace(PENALISED, temperature=1.2, top_k=6, top_p=0.92, min_p=0.02)
SETTINGS = {
    "plain": PLAIN,
    "filtered": FILTERED,
    "min-p": MIN_P,
    "penalised": PENALISED,
    "everything": EVERYTHING,
}


@torch.inference_mode()
def exact_distribution(model, params: SamplingParams, depth: int) -> dict[tuple[int, ...], float]:
    """The probability of every continuation of PROMPT by `depth` tokens, by transformers in float64."""
    vocab = model.config.vocab_size
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    joint = {(): 1.0}
    for length in range(depth):
        prefixes = list(product(range(vocab), repeat=length))
        ids = torch.tensor([[*PROMPT, *prefix] for prefix in prefixes])
        scores = model(ids).logits[:, -1].double()
        for token, bias in params.logit_bias.items():
            scores[:, token] += bias
        scores = processors(ids, scores)
        counts = torch.tensor([[prefix.count(token) for token in range(vocab)] for prefix in prefixes]).double()
        scores = scores - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        probabilities = warpers(ids, scores).softmax(-1)
        joint = {
            (*prefix, token): joint[prefix] * probabilities[row, token].item()
            for row, prefix in enumerate(prefixes)
            for token in range(vocab)
        }
    return joint


def draw(
    pair: Pair, params: SamplingParams, samples: int, k: int, drafter: str, depth: int
) -> Counter[tuple[int, ...]]:
    """Continuations by `depth` tokens out of the real Decoder, each with a seed of its own."""
    with Decoder.open(pair.bundle, max_batch=256) as decoder:
        requests = [
            decoder.submit(
                PROMPT,
                replace(params, max_new_tokens=depth, ignore_eos=True, seed=seed),
                draft_length=k,
                drafter=drafter,
            )
            for seed in range(samples)
        ]
        while decoder.step():
            pass
        proposed = decoder.speculation.proposed
        assert 0 < decoder.speculation.accepted < proposed or k == 0, "the test must see both verdicts"
    return Counter(tuple(request.token_ids) for request in requests)


def p_value(observed: Counter[tuple[int, ...]], joint: dict[tuple[int, ...], float]) -> float:
    return tail(*statistic(observed, joint))


def p_value_of(
    pair: Pair, params: SamplingParams, samples: int, k: int, drafter: str = "model", depth: int | None = None
) -> float:
    depth = depth or k + 2
    return p_value(draw(pair, params, samples, k, drafter, depth), exact_distribution(pair.exact, params, depth))


@pytest.mark.parametrize(
    ("settings", "rule", "drafter", "k"),
    [("filtered", "rejection", "model", 2)],
)
def test_output_is_distributed_as_the_target_alone(eight: Pair, settings: str, rule: str, drafter: str, k: int):
    assert p_value_of(eight, replace(SETTINGS[settings], rule=rule), 20_000, k, drafter) > FALSE_ALARM


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("settings", "rule", "drafter", "k"),
    [
        ("plain", "rejection", "model", 2),
        ("plain", "coupled", "lookup", 2),
        ("filtered", "coupled", "model", 1),
        ("min-p", "rejection", "lookup", 1),
        ("penalised", "rejection", "model", 1),
        ("everything", "coupled", "model", 2),
        ("everything", "rejection", "lookup", 2),
    ],
)
def test_output_is_distributed_as_the_target_alone_under_all_settings(
    eight: Pair, settings: str, rule: str, drafter: str, k: int
):
    assert p_value_of(eight, replace(SETTINGS[settings], rule=rule), 20_000, k, drafter) > FALSE_ALARM


# Negative controls, beside those that the certificate plants (tests/tools/certificate/test_faults.py): the same
# statistic sees a fault in the code that runs. The first two tokens of 2,000 samples are enough.


def p_value_with_the_fault(pair: Pair, params: SamplingParams) -> float:
    return p_value_of(pair, params, 2_000, k=1, depth=2)


def without_filters(plan):
    return replace(plan, top_k=False, top_p=False, min_p=False)


@pytest.mark.exhaustive
def test_the_controls_pass_without_a_fault(eight: Pair):
    assert p_value_with_the_fault(eight, PLAIN) > FALSE_ALARM


def test_chi_squared_catches_a_q_declared_filtered_of_a_draft_that_sampled_unfiltered(
    eight: Pair, monkeypatch: pytest.MonkeyPatch
):
    """Pitfalls 2 and 3."""
    sample, weights = drafters.inverse_cdf, {}

    def transform(logits, rows, plan, counts):
        weights["true"] = round_.transform(logits, rows, without_filters(plan), counts).softmax(-1)[:, 0]
        return round_.transform(logits, rows, plan, counts)

    monkeypatch.setattr(drafters, "transform", transform)
    monkeypatch.setattr(drafters, "inverse_cdf", lambda _, u: sample(weights["true"], u))
    assert p_value_with_the_fault(eight, COOL_TOP_3) < FALSE_ALARM


@pytest.mark.exhaustive
def test_chi_squared_catches_a_filter_after_the_subtraction(eight: Pair, monkeypatch: pytest.MonkeyPatch):
    """Pitfall 3: the residual is formed of unfiltered p and q and its unlikely tokens are cut off only then."""
    residual, transform, seen = acceptance.residual, round_.transform, {}

    def unfiltered(logits, rows, plan, counts):
        seen["kept"] = transform(logits, rows, plan, counts).isfinite()
        return transform(logits, rows, without_filters(plan), counts)

    def filtered_late(proposal, target, accepted):
        kept = acceptance.pick(seen["kept"], accepted)
        return residual(proposal, target, accepted) * kept + 1e-30 * kept

    monkeypatch.setattr(drafters, "transform", unfiltered)
    monkeypatch.setattr(round_, "transform", unfiltered)
    monkeypatch.setattr(acceptance, "residual", filtered_late)
    assert p_value_with_the_fault(eight, FILTERED) < FALSE_ALARM


@pytest.mark.exhaustive
def test_a_draft_with_another_transform_is_lossless_when_q_is_what_it_sampled_from(
    eight: Pair, monkeypatch: pytest.MonkeyPatch
):
    """A cooler, unfiltered draft only costs acceptance."""

    def cooler(logits, rows, plan, counts):
        return round_.transform(logits / 0.6, rows, without_filters(plan), counts)

    monkeypatch.setattr(drafters, "transform", cooler)
    assert p_value_with_the_fault(eight, FILTERED) > FALSE_ALARM
