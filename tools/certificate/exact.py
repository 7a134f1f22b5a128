"""The distribution a request asks for, in float64 and as plainly as it can be said; the runtime's own is not used."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from ...runtime import SamplingParams
from ...runtime.state.noise import gumbels


def scores(logits: Tensor, prompt: Sequence[int], output: Sequence[int], params: SamplingParams) -> Tensor:
    """Bias, penalties, temperature, top-k, top-p, min-p: scores [V] whose softmax is the next token's distribution."""
    scores = logits.double()
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    for token in {*prompt, *output}:
        repetition = params.repetition_penalty
        scores[token] = scores[token] / repetition if scores[token] > 0 else scores[token] * repetition
    for token, count in Counter(output).items():
        scores[token] -= count * params.frequency_penalty + params.presence_penalty
    if params.greedy:
        return scores
    scores = scores / params.temperature
    if 0 < params.top_k < len(scores):
        scores = at_least(scores, float(scores.topk(params.top_k).values[-1]))
    if params.top_p < 1:
        ordered = scores.sort(descending=True).values
        share = ordered.softmax(-1)
        needed = int((share.cumsum(-1) - share < params.top_p).sum())
        scores = at_least(scores, float(ordered[needed - 1]))
    if params.min_p > 0:
        likeliest = float(scores.max())
        scores = at_least(scores, likeliest + float(torch.tensor(params.min_p).double().log()))
    return scores


def at_least(scores: Tensor, threshold: float) -> Tensor:
    return scores.masked_fill(scores < threshold, -torch.inf)


def compared(logits: Tensor, prompt: Sequence[int], output: Sequence[int], params: SamplingParams) -> Tensor:
    """Return what greedy and the coupled rule take the argmax of: scores, and the noise of this index if sampled."""
    final = scores(logits, prompt, output, params)
    if params.greedy:
        return final
    assert params.seed is not None
    key = torch.tensor([[params.seed & 0xFFFFFFFF, params.seed >> 32]])
    return final + gumbels(key, torch.tensor([[len(prompt) + len(output)]]), len(final))[0, 0]
