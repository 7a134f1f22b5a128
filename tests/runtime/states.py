"""Rows and plans for tests of single parts, made as the scheduler makes them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from trt_spec.runtime import SamplingParams
from trt_spec.runtime.acceptance import seat
from trt_spec.runtime.drafters import Copier
from trt_spec.runtime.scheduling import planning
from trt_spec.runtime.state.asked import Share
from trt_spec.runtime.state.plan import Plan
from trt_spec.runtime.state.rows import Rows
from trt_spec.runtime.state.shapes import line


class Given(Copier):
    """A drafter whose proposals the test brings along."""

    name = "given"

    def __init__(self) -> None:
        self.place = 0


GIVEN = Given()


def make_rows(
    params: Sequence[SamplingParams], vocab: int, prompts: Sequence[Sequence[int]] | None = None, length: int = 256
) -> Rows:
    rows = seat.make_rows(len(params), length, vocab, 1, "cpu")
    for row, setting in enumerate(params):
        seat.admit(rows, row, list(prompts[row]) if prompts else [0], setting, setting.seed or 0, vocab)
    return rows


def make_plan(params: Sequence[SamplingParams], draft_length: int = 0, **fields: Any) -> Plan:
    shares = [Share.of(line(draft_length), GIVEN.name)] * len(params)
    return replace(planning.make_plan(params, shares, {GIVEN.name: GIVEN}, vocab_size=2**20), **fields)


def log(*probabilities: Any) -> torch.Tensor:
    """Scores whose softmax is given."""
    return torch.tensor(probabilities).log()
