"""DFlash heads: read in every form, wired by measurement, traced and checked against the block in torch, or refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from trt_spec.engines import ExportError, Masks
from trt_spec.export.checking.oracle import hidden_states
from trt_spec.export.kinds.dflash import DFlash

from ..kit.heads import dflash_head
from ..kit.joining import HIDDEN, VOCAB, change, check, loaded, without, write

TOKENS = [(7 * i * i + 3 * i) % (VOCAB - 1) for i in range(50)]
FORMS: dict[str, dict[str, Any]] = {
    "speculators": {"draft_vocab": 48},
    "its authors": {"form": "authors"},
    "the anchor speaks": {"sample_from_anchor": True},
    "one layer, a block of two": {"layers": 1, "size": 2},
}


@pytest.mark.parametrize("form", FORMS)
def test_the_graph_of_every_form_says_what_the_block_says(
    form: str, target: Path, teacher: Any, tmp_path: Path
) -> None:
    head = loaded(dflash_head(tmp_path / "head", target, **FORMS[form]), target, teacher, TOKENS)
    report, said = check(head, write(head, tmp_path / "dflash"), TOKENS)
    assert report["worst_error"] < report["tolerance"] / 10
    assert said.shape == (len(TOKENS) - 1, VOCAB)
    size, first = FORMS[form].get("size", 5), 1 if "sample_from_anchor" in FORMS[form] else 2
    assert head.module.masks == Masks(63, size - 1, repeats=True, first=first)
    assert head.module.masks.most == head.module.block.proposals == size + 1 - first
    assert len(head.readings) == (1 if form == "its authors" else 2), "ids as they are, or of the states behind them"


@torch.no_grad()
def test_a_block_alone_and_step_by_step(target: Path, teacher: Any, tmp_path: Path) -> None:
    """By hand, for one anchor: keys and values of the context are those of the features, of the block its own."""
    head = loaded(dflash_head(tmp_path / "head", target, layers=1), target, teacher, TOKENS).module
    features, anchor = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(1)), 11
    hidden = head.embed_tokens(torch.tensor([TOKENS[anchor], 63, 63, 63, 63]))
    layer, attention = head.layers[0], head.layers[0].self_attn
    normed = layer.input_layernorm(hidden)
    read = torch.cat([features[:anchor], normed])
    cos, sin = head.rotary_emb(hidden[None], torch.arange(anchor + 5)[None])

    def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        return x * cos[0, :, None] + torch.cat([-x[..., half:], x[..., :half]], -1) * sin[0, :, None]

    key = turned(attention.k_norm(attention.k_proj(read).view(-1, 2, 16)), cos, sin).repeat_interleave(2, 1)
    value = attention.v_proj(read).view(-1, 2, 16).repeat_interleave(2, 1)
    query = turned(attention.q_norm(attention.q_proj(normed).view(-1, 4, 16)), cos[:, anchor:], sin[:, anchor:])
    shares = (torch.einsum("qhd,khd->hqk", query, key) / 4).softmax(-1)
    hidden = hidden + attention.o_proj(torch.einsum("hqk,khd->qhd", shares, value).flatten(1))
    hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    expected = head.lm_head(head.norm(hidden))[1:]
    said = head.said(torch.tensor(TOKENS[:20]), features, [3, anchor, 19])[1]
    torch.testing.assert_close(said, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fault", ["the block is causal", "context a place late", "context of the block's own states"])
def test_the_check_of_a_block_bites(fault: str, target: Path, teacher: Any, tmp_path: Path) -> None:
    head = loaded(dflash_head(tmp_path / "head", target), target, teacher, TOKENS)
    states = DFlash.states

    def faulty(self: DFlash, ids: Any, features: Any, positions: Any, in_block: Any, mask: Any, cache: Any) -> Any:
        if cache is not None and fault == "context a place late":
            positions = positions + (~in_block).to(positions.dtype)
        if cache is not None and fault == "context of the block's own states":
            in_block = torch.ones_like(in_block)
        if cache is not None and fault == "the block is causal":
            behind = torch.arange(mask.shape[-1]) <= positions[:, None, :, None] + 1
            mask = mask & behind
        return states(self, ids, features, positions, in_block, mask, cache)

    with (
        patch.object(DFlash, "states", faulty),
        pytest.raises(ExportError, match="dflash graph does not compute what its checkpoint computes"),
    ):
        check(head, write(head, tmp_path / "dflash"), TOKENS)


@torch.no_grad()
def test_overlap_is_that_of_the_distributions_of_a_block(target: Path, teacher: Any, tmp_path: Path) -> None:
    found = loaded(dflash_head(tmp_path / "head", target, "authors", scale=0.3), target, teacher, TOKENS)
    hidden, logits = hidden_states(teacher, torch.tensor([TOKENS]))
    anchors = list(range(1, len(TOKENS) - 4, 8))
    said = found.module.said(torch.tensor(TOKENS), found.features(hidden)[0], anchors).softmax(-1)
    distribution = logits[0].softmax(-1)
    for place in range(4):
        each = [torch.minimum(distribution[a + place], said[n, place]).sum() for n, a in enumerate(anchors)]
        [overlap] = found.readings.values()
        assert overlap[place] == pytest.approx(float(sum(each)) / len(anchors), abs=1e-5)


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "an unknown field": (lambda head: change(head, gate=True), "has the field 'gate'"),
    "layers of another type": (
        lambda head: change(head, transformer_layer_config={"model_type": "llama", "hidden_size": 32}),
        "has layers of the type 'llama', expected qwen3",
    ),
    "a window": (
        lambda head: change(head, transformer_layer_config={"layer_types": ["sliding_attention"]}),
        "see a sliding window",
    ),
    "no mask": (lambda head: change(head, mask_token_id=None), "has the mask_token_id None"),
    "a large block": (lambda head: change(head, block_size=64), "has the block_size 64, expected 2 to 32"),
    "no layers": (lambda head: change(head, aux_hidden_state_layer_ids=[]), "names no layers of its target"),
    "layers that the target lacks": (
        lambda head: change(head, aux_hidden_state_layer_ids=[5, 6]),
        "which has 4 layers; take the head of this target",
    ),
    "a tensor missing": (lambda head: without(head, "fc.weight"), "lacks the tensor encoder.fc.weight"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_head_of_this_target_is_refused_in_a_sentence(
    what: str, target: Path, teacher: Any, tmp_path: Path
) -> None:
    damage, message = REFUSED[what]
    head = dflash_head(tmp_path / "head", target)
    damage(head)
    with pytest.raises(ExportError, match=message):
        loaded(head, target, teacher, TOKENS)
