"""Recurrent layers as plain operators: what a token sees, which layers there are, and how long texts may be."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.zamba2 import modeling_zamba2
from trt_spec.export import export_bundle
from trt_spec.export.checkpoints.agreement import agreed_length
from trt_spec.export.checkpoints.checkpoint import open_checkpoint
from trt_spec.export.families.shape import WEIGHTLESS
from trt_spec.export.tracing import recurrent
from trt_spec.export.tracing.cache import Places
from trt_spec.export.tracing.entries import Entries
from trt_spec.export.tracing.recurrent import RecurrentCache
from trt_spec.export.tracing.recurrent_layers import layers_in

from ..kit.families import tiny_checkpoint
from ..kit.hybrids import some_prompts, tiny_hybrid
from ..kit.models import tiny_llama

WIDTH, PENDING, HEADS, KEY, VALUE = 6, 2, 2, 4, 3
DECAY = -60.0  # the logarithm of one; of two more there is no number for what they would be worth the other way


@pytest.mark.parametrize("rule", ["delta rule", "delta rule by channel", "Mamba-2"])
def test_a_token_that_sees_no_path_leaves_the_others_as_they_are(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is where a row has fewer branches than its neighbours: nodes of an earlier round stand among others."""
    torch.manual_seed(0)
    monkeypatch.setattr(recurrent, "marked", lambda _, value: value)  # which is zero outside of a trace
    query, keys, values = (
        torch.nn.functional.normalize(torch.randn(1, HEADS, count, size), dim=-1)
        for count, size in ((WIDTH, KEY), (PENDING + WIDTH, KEY), (PENDING + WIDTH, VALUE))
    )
    decays = torch.full((1, HEADS, PENDING + WIDTH, KEY if rule.endswith("by channel") else 1), DECAY)
    rates = None if rule == "Mamba-2" else torch.full((1, HEADS, PENDING + WIDTH), 0.5)
    state, ones = torch.randn(1, HEADS, KEY, VALUE), torch.ones(1, dtype=torch.int64)

    def answered(seen_by_last: list[bool]) -> tuple[torch.Tensor, torch.Tensor]:
        depths = torch.arange(WIDTH)[None]
        ancestors = torch.ones(1, WIDTH, WIDTH, dtype=torch.bool).tril()
        ancestors[0, -1] = torch.tensor(seen_by_last)
        places = Places(ones, depths, ancestors, depths)
        entries = Entries(places, torch.arange(PENDING)[None], 2 * ones, 2 * ones, 0 * ones)
        return RecurrentCache(places, entries, {}).attend(query, keys, values, decays, rates, state)

    line, none = answered([True] * WIDTH), answered([False] * (WIDTH - 2) + [True, True])
    assert line[0].any()
    assert torch.equal(line[1], none[1]), "the state absorbs pending tokens alone"
    torch.testing.assert_close(none[0][:, :, :-1], line[0][:, :, :-1])
    assert none[0].isfinite().all()


def test_where_no_token_takes_memory_texts_are_as_long_as_they_are_wanted(tmp_path: Path) -> None:
    alone, plain = tiny_checkpoint("mamba2", tmp_path / "alone"), tiny_llama(tmp_path / "plain")
    opened = [open_checkpoint(alone), open_checkpoint(plain)]
    assert opened[0].shape.positions == agreed_length(opened[:1], None) == WEIGHTLESS
    assert agreed_length(opened, None) == 256
    named = tiny_checkpoint("mamba2", tmp_path / "named", max_position_embeddings=512)
    assert open_checkpoint(named).shape.positions == 512


def test_each_use_of_a_shared_block_attends(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(tiny_checkpoint("zamba2", tmp_path / "checkpoint"))
    recurrent, attends = layers_in(config)
    assert [layer.number for layer in recurrent] == [0, 1, 2, 3, 4]
    assert attends == (0, 2, 3)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "recurrent"), [("lfm2", "conv"), ("granitemoehybrid", "linear_attention")])
def test_no_layer_of_any_family_needs_to_attend(tmp_path: Path, kind: str, recurrent: str) -> None:
    checkpoint = tiny_checkpoint(kind, tmp_path / "checkpoint", layer_types=[recurrent] * 2)
    [target] = export_bundle(checkpoint, tmp_path / "bundle").models
    assert target.entry.contract.layers == 0
    assert target.entry.check["worst_error"] < 2e-4


@pytest.mark.exhaustive
def test_single_steps_of_transformers_differ_in_the_limit_of_time_steps_alone(tmp_path: Path) -> None:
    """So the texts of Zamba 2 are compared with those that it says without a cache."""
    model = AutoModelForCausalLM.from_pretrained(tiny_hybrid("zamba2", tmp_path / "checkpoint")).eval()
    least, _ = model.model.layers[0].mamba_decoder.mamba.time_step_limit
    own = modeling_zamba2.mamba2_selective_state_update

    def limited(*args: Any, dt_bias: torch.Tensor, dt_softplus: bool, **kwargs: Any) -> torch.Tensor:
        state, hidden, dt, *others = args
        dt = functional.softplus(dt + dt_bias).clamp(min=least)
        found: torch.Tensor = own(state, hidden, dt, *others, dt_softplus=False, **kwargs)
        return found

    def said(prompt: list[int], use_cache: bool) -> list[int]:
        ids = torch.tensor([prompt])
        settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 30}
        text = model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=use_cache, **settings)
        return [int(token) for token in text[0, len(prompt) :]]

    prompts = some_prompts()
    whole = [said(prompt, use_cache=False) for prompt in prompts]
    assert [said(prompt, use_cache=True) for prompt in prompts] != whole
    with patch.object(modeling_zamba2, "mamba2_selective_state_update", limited):
        assert [said(prompt, use_cache=True) for prompt in prompts] == whole
