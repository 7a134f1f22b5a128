"""Whether texts are drawn from a model's distributions: each of their tokens, whatever stands before it.

A model in torch says the distributions of all tokens of a text in one call. Let the tokens of a distribution lie one
after another on the line from 0 to 1, the likeliest first, each as long as it is likely. A point that is drawn evenly
within the token that was said lies evenly on the line, and tells nothing of the points before it, if that token was
drawn from its distribution. So texts of any model, vocabulary and length are judged by the same statistics: how many
points lie in each of PARTS parts of the line, and how those of tokens that stand so far APART go together.

Among these parts, or pairs of them, a total variation d of n points moves its statistic by 4 · n · d² at least.
"""

from collections.abc import Callable, Sequence
from math import pi, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from trt_spec.tools.certificate.chi_squared import samples_needed, tail

from .sampled import FALSE_ALARM, POWER

PARTS, APART = 8, (1, 2, 3)
PARTS_OF_A_PAIR = 4  # for each of its points
FREEDOM = {"alone": PARTS - 1} | {f"{apart} apart": (PARTS_OF_A_PAIR - 1) ** 2 for apart in APART}
TOGETHER = 64  # texts that the model reads in one call

Reweight = Callable[[Tensor, Sequence[int], Sequence[int]], Tensor]


def points_of(logits: Tensor, tokens: Tensor, random: torch.Generator) -> Tensor:
    """Return a point [N] for each of the tokens [N], whose distributions have these logits [N, V]."""
    distributions, ids = logits.double().softmax(-1).sort(dim=-1, descending=True, stable=True)
    place = (ids == tokens[:, None]).long().argmax(-1, keepdim=True)
    own = distributions.gather(1, place)[:, 0]
    assert own.min() > 0, "none of the tokens is impossible"
    return distributions.cumsum(-1).gather(1, place)[:, 0] - own * torch.rand(
        len(tokens), generator=random, dtype=own.dtype
    )


@torch.inference_mode()
def points_of_texts(
    model: Any,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    vocab: int,
    seed: int = 0,
    asked: Reweight | None = None,
) -> list[Tensor]:
    """Return the points of each output's tokens, by what a model in torch says behind its prompt.

    What is `asked` for makes other logits of the model's [N, V] for a prompt and an output.
    """
    random, found = torch.Generator().manual_seed(seed), list[Tensor]()
    for first in range(0, len(prompts), TOGETHER):
        each = [*zip(prompts[first : first + TOGETHER], outputs[first : first + TOGETHER], strict=True)]
        ids = pad_sequence([torch.tensor([*prompt, *output]) for prompt, output in each], batch_first=True)
        logits = model(ids, use_cache=False).logits[..., :vocab]
        for row, (prompt, output) in enumerate(each):
            said = logits[row, len(prompt) - 1 : len(prompt) + len(output) - 1]
            said = said if asked is None else asked(said, prompt, output)
            found.append(points_of(said, torch.tensor([*output]), random))
    return found


def p_values(texts: Sequence[Tensor]) -> dict[str, float]:
    """Say how likely chance takes each statistic of the points [N] of some texts as far as this."""
    found = {"alone": _tail([waves(points, PARTS) for points in texts])}
    for apart in APART:
        pairs = [waves(points, PARTS_OF_A_PAIR) for points in texts]
        both = [(one[:-apart, :, None] * one[apart:, None]).flatten(1) for one in pairs]
        found[f"{apart} apart"] = _tail(both)
    return found


def waves(points: Tensor, parts: int) -> Tensor:
    """Return [N, parts - 1] functions of the part in which each point lies: of even points they are independent.

    Each is 0 on average, and 1 is its square; the sum over them of what n points add up to, squared, through n, is
    Pearson's χ² of the parts.
    """
    part = points.mul(parts).long().clamp_(max=parts - 1)
    return sqrt(2) * (pi / parts * (part[:, None] + 0.5) * torch.arange(1, parts)).cos()


def _tail(found: Sequence[Tensor]) -> float:
    each = torch.cat([*found]).double()
    return tail(float((each.sum(0).square() / len(each)).sum()), each.shape[1])


def needed(total_variation: float) -> int:
    """Return how many tokens catch a fault of a total variation in any of the statistics with probability POWER."""
    each = [samples_needed(freedom, total_variation, _false_alarm(), POWER) for freedom in FREEDOM.values()]
    return max(each)


def are_drawn(texts: Sequence[Tensor], total_variation: float) -> bool:
    """Whether the points of texts are those of tokens that were drawn from their distributions."""
    pairs = sum(max(0, len(points) - max(APART)) for points in texts)
    assert pairs >= needed(total_variation), f"{pairs:,} pairs are too few, it takes {needed(total_variation):,}"
    found = p_values(texts)
    print(f"{sum(map(len, texts)):,} tokens:", *(f"{name} p = {p:.2g}" for name, p in found.items()))
    return min(found.values()) > _false_alarm()


def _false_alarm() -> float:
    return FALSE_ALARM / len(FREEDOM)
