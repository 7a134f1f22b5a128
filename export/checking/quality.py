"""Measure on running text what a stored model has lost against its checkpoint, and how often a draft will agree."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import exp

import torch
from torch import Tensor

from ...engines import MOST_READ, Engine, blank_cache, blank_step

LONGEST = 256  # tokens of the text that are read at most,
LOGITS = 2**23  # and logits: with a large vocabulary these take more memory than the model's layers
CHUNK = 64
NO_SOURCE: Mapping[str, Tensor] = {}
COMPARED = 2**18  # logits at a time: many short calls of torch wait for its threads


@dataclass(frozen=True)
class Sample:
    """Running text of a vocabulary."""

    tokens: list[int]
    vocab_size: int

    def first(self, most: int) -> "Sample":
        return Sample(self.tokens[:most], self.vocab_size)


@dataclass(frozen=True)
class Quality:
    """Differences of the stored model from its checkpoint on the same text."""

    tokens: int
    worst_logit_error: float  # in standard deviations of the checkpoint's logits
    divergence: float  # mean KL(checkpoint ‖ stored), nats
    perplexity: float
    checkpoint_perplexity: float


@torch.no_grad()
def engine_logits(engine: Engine, tokens: list[int], source: Mapping[str, Tensor] = NO_SOURCE) -> Tensor:
    """Compute the logits `[L, V]` of the stored graph, which reads the text in chunks, as it reads a prompt.

    It has a source if the memory of one is given.
    """
    return torch.cat(list(_chunks(engine, tokens, source)))


def _chunks(engine: Engine, tokens: list[int], source: Mapping[str, Tensor]) -> Iterator[Tensor]:
    cache = blank_cache(engine.contract, 1, len(tokens), engine.device)
    cache |= {state.name: engine.everywhere(cache[state.name]) for state in engine.contract.kept} | dict(source)
    width = MOST_READ if engine.contract.recurrent else CHUNK
    for start in range(0, len(tokens), width):
        chunk = tokens[start : start + width]
        step = blank_step(engine, cache, 0, 1, len(chunk), len(chunk))
        step.input_ids[0] = torch.tensor(chunk)
        step.start[0] = start
        if engine.contract.recurrent:
            step.inputs["fold"][0] = len(chunk)
        step.run()
        yield step.logits[0]


def measure(checkpoint: Tensor, stored: Tensor, tokens: list[int]) -> Quality:
    """Compare a few rows at a time: with a large vocabulary, all in float64 would take more memory than the model."""
    divergence = 0.0
    surprise = {"checkpoint": 0.0, "stored": 0.0}  # nats
    rows = max(1, COMPARED // checkpoint.shape[1])
    for start in range(0, len(tokens), rows):
        expected, found = (logits[start : start + rows].double().log_softmax(-1) for logits in (checkpoint, stored))
        divergence += float((expected.exp() * (expected - found)).sum())
        following = torch.tensor(tokens[start + 1 : start + rows + 1], dtype=torch.int64)[:, None]
        surprise["checkpoint"] -= float(expected[: len(following)].gather(1, following).sum())
        surprise["stored"] -= float(found[: len(following)].gather(1, following).sum())
    perplexity = {name: exp(nats / (len(tokens) - 1)) for name, nats in surprise.items()}
    return Quality(
        tokens=len(tokens),
        worst_logit_error=float(torch.dist(stored, checkpoint, torch.inf) / checkpoint.std()),
        divergence=divergence / len(tokens),
        perplexity=perplexity["stored"],
        checkpoint_perplexity=perplexity["checkpoint"],
    )


def apart(some: Tensor, others: Tensor) -> float:
    """Return the root mean square of what logits differ by."""
    return float((some - others).square().mean().sqrt())


def overlap(target: Tensor, draft: Tensor, temperature: float) -> float:
    """Compute α, the mean over positions of Σ min(p, q), accepted of first proposals; at 0, greedy agreement."""
    vocab = min(target.shape[1], draft.shape[1])
    total = 0.0
    for ours, theirs in zip(target[:, :vocab], draft[:, :vocab], strict=True):
        if temperature == 0:
            total += float(ours.argmax() == theirs.argmax())
        else:
            p, q = ((logits.double() / temperature).softmax(-1) for logits in (ours, theirs))
            total += float(torch.minimum(p, q).sum())
    return total / len(target)
