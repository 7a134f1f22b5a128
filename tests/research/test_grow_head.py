"""A head that grows with its target says what it said."""

from pathlib import Path
from typing import Any

import pytest
import torch
from trt_spec.engines import RequestError
from trt_spec.export.checking.oracle import hidden_states
from trt_spec.export.checking.quality import Sample
from trt_spec.export.checkpoints.checkpoint import load_model, open_checkpoint
from trt_spec.export.kinds import open_head, open_look_aheads
from trt_spec.tools.making.growing import LlamaSize
from trt_spec.tools.making.kept_bundles import DEMO_DRAFTS, TARGET
from trt_spec.tools.research import grow_pair
from trt_spec.tools.research.grow_head import grow_head

from ..kit.heads import dflash_head, eagle3_head, look_aheads, parallel_heads
from ..kit.models import tiny_llama

pytestmark = pytest.mark.research

LOGITS = 1e-4  # the sums of the larger shape are rounded in another order, no more
SHAPE = LlamaSize(hidden=80, layers=6, heads=8, kv_heads=4, mlp=160)
TOKENS = [(7 * i * i + 3 * i) % 64 for i in range(60)]
FORMS: dict[str, dict[str, Any]] = {
    "eagle3": {"draft_vocab": 48},
    "eagle3 of SpecForge": {"form": "original", "bias": True, "rope_parameters": {"rope_theta": 1e4}},
    "eagle3 with its own embedding": {"own_embedding": True, "norms": "input"},
    "eagle3 of two layers": {"layers": 2, "norms": "each"},
    "medusa": {},
    "medusa of two layers, with the target's projection": {"layers": 2, "own_projections": False, "form": "ours"},
    "blockwise": {},
}


@torch.no_grad()
def said(head: Path, target: Path, tokens: list[int]) -> tuple[list[torch.Tensor], Any]:
    """Return what a head says behind its target, at its first places, and how it is wired."""
    teacher, opened = load_model(open_checkpoint(target), "float32"), open_head(head)
    assert opened is not None
    contract = open_checkpoint(target).shape.contract(256, "float32")
    found = opened.kind.load(opened, teacher, contract, Sample(tokens, teacher.config.vocab_size))
    features = found.features(hidden_states(teacher, torch.tensor([tokens]))[0])
    if opened.kind.name != "eagle3":
        return list(found.module(features[0])[1].unbind(1)), None
    steps = found.module.unrolled(torch.tensor([tokens[1:]]), features[:, :-1], 3)
    return [found.module.logits(normed)[0] for normed in steps], found.module.wiring


@pytest.mark.parametrize("form", FORMS)
def test_a_grown_head_says_behind_its_grown_target_what_it_said(form: str, tmp_path: Path) -> None:
    target, kind = tiny_llama(tmp_path / "target", num_hidden_layers=4), form.partition(" ")[0]
    if kind == "eagle3":
        wired = {"norm_before_residual": False, "norm_output": False, "scale": 0.2}
        head = eagle3_head(tmp_path / "head", target, **wired | FORMS[form])
    else:
        head = parallel_heads(tmp_path / "head", target, kind, **FORMS[form])
    arguments = [f"--{name.replace('_', '-')}={size}" for name, size in vars(SHAPE).items()]
    grown = tmp_path / "grown", tmp_path / "grown head"
    assert grow_pair.main([str(target), str(grown[0]), *arguments, "--head", str(head), str(grown[1])]) == 0
    (before, wiring), (after, same) = said(head, target, TOKENS), said(grown[1], grown[0], TOKENS)
    assert same == wiring
    assert len(before) == len(after) == 3
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(other, one, atol=LOGITS, rtol=LOGITS)
        assert float(one.std()) > 100 * LOGITS


def test_grown_look_aheads_let_the_grown_target_say_what_they_let_it_say(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target", num_hidden_layers=4)
    head = look_aheads(tmp_path / "head", target)
    arguments = [f"--{name.replace('_', '-')}={size}" for name, size in vars(SHAPE).items()]
    grown = tmp_path / "grown", tmp_path / "grown head"
    assert grow_pair.main([str(target), str(grown[0]), *arguments, "--head", str(head), str(grown[1])]) == 0
    found = []
    for one, its_head in ((target, head), grown):
        model, opened = load_model(open_checkpoint(one), "float32"), open_look_aheads(its_head)
        assert opened is not None
        ids = [64 + place for place in range(opened.join(model, 64))]
        with torch.no_grad():
            found.append(model(torch.tensor([TOKENS + ids])).logits[0, -len(ids) :])
    torch.testing.assert_close(found[1], found[0], atol=LOGITS, rtol=LOGITS)


def test_layers_that_nobody_names_stay_those_of_the_small_target(tmp_path: Path) -> None:
    """2, n ÷ 2 and n - 3 of n layers would be others of the large one."""
    target = tiny_llama(tmp_path / "target", num_hidden_layers=6)
    head = eagle3_head(tmp_path / "head", target, form="original", eagle_config=None)
    grow_head(head, tmp_path / "grown", LlamaSize(32, 6, 4, 2, 64), LlamaSize(80, 12, 8, 4, 160))
    opened = open_head(tmp_path / "grown")
    assert opened is not None
    assert opened.fields["eagle_aux_hidden_state_layer_ids"] == [2, 3, 3]


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "blockwise"])
def test_the_shipped_heads_grow_with_the_demo_target(kind: str, tmp_path: Path) -> None:
    old, new = LlamaSize(384, 8, 6, 2, 1024), LlamaSize(hidden=768, layers=12, heads=12, kv_heads=4, mlp=2048)
    grow_pair.grow(TARGET, tmp_path / "target", new)
    grow_head(DEMO_DRAFTS[kind], tmp_path / "head", old, new)
    tokens = [(7 * i * i + 3 * i) % 4000 for i in range(60)]
    before, after = said(DEMO_DRAFTS[kind], TARGET, tokens)[0], said(tmp_path / "head", tmp_path / "target", tokens)[0]
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(other, one, atol=1e-2, rtol=1e-3)  # of logits as large as 30


def test_what_cannot_be_grown_is_refused_in_a_sentence(tmp_path: Path) -> None:
    target, old = tiny_llama(tmp_path / "target", num_hidden_layers=3), LlamaSize(32, 3, 4, 2, 64)
    with pytest.raises(RequestError, match="is a head of the kind dflash, only those of the kinds eagle3, medusa"):
        grow_head(dflash_head(tmp_path / "dflash", target), tmp_path / "out", old, SHAPE)
    with pytest.raises(RequestError, match="is no head, only those"):
        grow_head(target, tmp_path / "out", old, SHAPE)
    with pytest.raises(RequestError, match=r"has the tensor lora.model.layers.0.mlp.down_proj.down, which can"):
        grow_head(look_aheads(tmp_path / "lora", target, rank=2), tmp_path / "out", old, SHAPE)
    normed = eagle3_head(tmp_path / "qwen3", target, kind="qwen3")
    with pytest.raises(RequestError, match=r"has the tensor layers.0.self_attn.k_norm.weight, which cannot be grown"):
        grow_head(normed, tmp_path / "out", old, SHAPE)
    with pytest.raises(RequestError, match="the head has 32 channels and its target 40"):
        grow_head(eagle3_head(tmp_path / "head", target), tmp_path / "out", LlamaSize(40, 3, 4, 2, 64), SHAPE)
    assert not (tmp_path / "out").exists()
