"""Transformers computes in float64 how all that may follow a prompt is distributed, over a vocabulary of 8 tokens."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from trt_spec.runtime import SamplingParams

PROMPT = [2, 2]  # repeats, so that lookup has something to copy in the first round
PLAIN = SamplingParams(temperature=1.0)
FILTERED = SamplingParams(temperature=1.3, top_k=6, top_p=0.9)
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


def warpers_of(params: SamplingParams) -> LogitsProcessorList:
    """What transformers does to scores for these parameters, after biases and penalties."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers


@torch.inference_mode()
def exact_distribution(
    model: Any, params: SamplingParams, depth: int, prompt: Sequence[int] = PROMPT
) -> dict[tuple[int, ...], float]:
    """The probability of all tokens 2 … 1 + `depth` after the prompt."""
    vocab = model.config.vocab_size
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    warpers = warpers_of(params)
    joint = {(): 1.0}
    for length in range(1 + depth):
        prefixes = list(product(range(vocab), repeat=length))
        ids = torch.tensor([[*prompt, *prefix] for prefix in prefixes])
        scores = model(ids).logits[:, -1].double()
        for token, bias in params.logit_bias.items():
            scores[:, token] += bias
        if length < params.min_tokens:
            scores[:, list(params.stop_token_ids)] = -torch.inf
        scores = processors(ids, scores)
        counts = torch.tensor([[prefix.count(token) for token in range(vocab)] for prefix in prefixes]).double()
        scores = scores - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        probabilities = warpers(ids, scores).softmax(-1)
        joint = {
            (*prefix, token): joint[prefix] * probabilities[row, token].item()
            for row, prefix in enumerate(prefixes)
            for token in range(vocab)
        }
    after_the_first: Counter[tuple[int, ...]] = Counter()
    for tokens, probability in joint.items():
        after_the_first[tokens[1:]] += probability
    return after_the_first
