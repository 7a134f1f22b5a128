"""Judges the first token at which an output differs from its reference: a near tie of two scores, or a bug.

Widths and batch shapes round differently, so two scores may swap whose gap is no larger than what the shapes differ
by. A difference is excused only if the gap is at most 2 × the measured difference between the shapes, and at most
1e-3 in float32 (pitfall 13); whatever else differs is a bug.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from trt_spec.engines import Bundle, Engine, blank_step, open_engine
from trt_spec.runtime.cache import KVCache

LARGEST_GAP = 1e-3

Score = Callable[[Tensor, Sequence[int]], Tensor]  # logits [V] after these tokens, to the scores the rule compares


@dataclass(frozen=True)
class NearTie:
    """An excused difference."""

    position: int  # index in the output
    tokens: tuple[int, int]
    gap: float
    difference: float  # between the shapes


def first_difference(output: Sequence[int], expected: Sequence[int]) -> int | None:
    """Index of the first token that differs, one output ending early included."""
    for index, (found, wanted) in enumerate(zip(output, expected, strict=False)):
        if found != wanted:
            return index
    return None if len(output) == len(expected) else min(len(output), len(expected))


class Arbiter:
    """Runs the target of a bundle, and the checkpoint if given, in all shapes that took part."""

    def __init__(self, bundle: Any, reference: Any = None) -> None:
        self.bundle = Bundle.open(bundle)
        self.reference = reference
        self.excused: list[NearTie] = []
        self.engine = open_engine("onnxruntime", self.bundle.graph("target"), self.bundle.target.contract)

    def require_equal(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        expected: Sequence[int],
        width: int,
        batch: int = 1,
        score: Score = lambda logits, tokens: logits,
    ) -> None:
        """Fail at an unexplained difference; remember an excused one."""
        at = first_difference(output, expected)
        if at is None:
            return
        assert at < min(len(output), len(expected)), f"one output ends after {at} tokens, the other goes on"
        context, tokens = [*prompt, *expected[:at]], (output[at], expected[at])
        shapes = [score(logits, context)[list(tokens)] for logits in self.shapes(context, width, batch)]
        gap = min(float((scores[0] - scores[1]).abs()) for scores in shapes)
        difference = max(float((a - b).abs().max()) for a in shapes for b in shapes)
        tie = NearTie(at, tokens, gap, difference)
        assert gap <= min(2 * difference, LARGEST_GAP), f"unexplained difference: {tie}, shapes {shapes}"
        self.excused.append(tie)

    def shapes(self, context: Sequence[int], width: int, batch: int) -> list[Tensor]:
        """The logits after `context` from a step of width 1, one of `width` in `batch` rows, and the checkpoint."""
        logits = [self.logits(context, 1, 1), self.logits(context, min(width, len(context)), batch)]
        if self.reference is not None:
            with torch.inference_mode():
                logits.append(self.reference(torch.tensor([context])).logits[0, -1, : logits[0].shape[0]])
        return logits

    @torch.inference_mode()
    def logits(self, context: Sequence[int], width: int, batch: int) -> Tensor:
        engine, before = self.engine, len(context) - width
        cache = KVCache(engine.contract, "cpu", batch, len(context) + width)
        engine.bind(cache.buffers)
        for row in range(batch if before else 0):
            feed(engine, row, context[:before], 0)
        step = blank_step(engine, 0, batch, width, width)
        step.input_ids.copy_(torch.tensor(context[before:]))
        step.start.fill_(before)
        step.run()
        return step.logits[0, -1, : self.bundle.tokenizer.vocab_size].clone()


def feed(engine: Any, row: int, tokens: Sequence[int], start: int) -> Tensor:
    """One call for `tokens` from `start` on; the logits [V] after the last."""
    step = blank_step(engine, row, 1, len(tokens), 1)
    step.input_ids[0] = torch.tensor(tokens)
    step.start[0] = start
    step.run()
    return step.logits[0, -1].clone()


def cache_of(engine: Engine, rows: int, capacity: int = 64) -> KVCache:
    """Bound, and full of sevens, which what is written replaces."""
    cache = KVCache(engine.contract, "cpu", rows, capacity)
    for buffer in cache.buffers.values():
        buffer.fill_(7.0)
    engine.bind(cache.buffers)
    return cache
