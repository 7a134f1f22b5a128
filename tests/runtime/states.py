"""Rows and plans for tests of single parts, made as the scheduler makes them."""

from collections.abc import Sequence
from typing import Any

import torch
from trt_spec.runtime import SamplingParams
from trt_spec.runtime.round.rows import Plan, Rows


def make_rows(
    params: Sequence[SamplingParams], vocab: int, prompts: Sequence[Sequence[int]] | None = None, length: int = 256
) -> Rows:
    rows = Rows.allocate(len(params), length, vocab, "cpu")
    for row, setting in enumerate(params):
        rows.admit(row, list(prompts[row]) if prompts else [0], setting, setting.seed or 0, vocab)
    return rows


def make_plan(params: Sequence[SamplingParams], draft_length: int = 0, **fields: Any) -> Plan:
    sampled = [setting for setting in params if not setting.greedy]
    return Plan(
        batch=len(params),
        draft_length=draft_length,
        **{
            "tempered": any(setting.temperature != 1 for setting in sampled),
            "own_draft": any(setting.own_draft_temperature != setting.temperature for setting in params),
            "rejection": any(setting.rule == "rejection" for setting in sampled),
            "coupled": any(setting.greedy or setting.rule == "coupled" for setting in params),
            "gumbel": any(setting.rule == "coupled" for setting in sampled),
            "lenient": any(setting.lenient for setting in params),
            "top_k": any(setting.top_k for setting in sampled),
            "top_p": any(setting.top_p < 1 for setting in sampled),
            "min_p": any(setting.min_p for setting in sampled),
            "penalised": any(setting.penalised for setting in params),
            "biased": any(setting.logit_bias for setting in params),
        }
        | fields,
    )


def log(*probabilities: Any) -> torch.Tensor:
    """Scores whose softmax is given."""
    return torch.tensor(probabilities).log()
