"""Medusa and blockwise heads: read in every form, checked against a few lines of their own, or refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from trt_spec.engines import ExportError
from trt_spec.export.checking.oracle import hidden_states
from trt_spec.export.checking.quality import Sample
from trt_spec.export.checkpoints.checkpoint import load_model, open_checkpoint
from trt_spec.export.checkpoints.vocabulary import read_vocabulary
from trt_spec.export.kinds import open_head
from trt_spec.export.kinds.parallel import ParallelHeads
from trt_spec.export.pipeline import SAMPLE as SHIPPED_SAMPLE
from trt_spec.tools.making.kept_bundles import DEMO_DRAFTS, TARGET

from ..kit.heads import parallel_heads
from ..kit.joining import VOCAB, check, edit, loaded, write

TOKENS = [(7 * i * i + 3 * i) % VOCAB for i in range(40)]
FORMS: dict[str, dict[str, Any]] = {
    "Medusa of its authors": {"kind": "medusa"},
    "Medusa by blocks": {"kind": "medusa", "form": "blocks", "layers": 2},
    "Medusa that shares the projection": {"kind": "medusa", "own_projections": False},
    "blockwise": {"kind": "blockwise", "count": 4},
}


def by_hand(head: Path, teacher: Any, hidden: torch.Tensor) -> torch.Tensor:
    """What the heads say after hidden states [L, size], by the tensors of the file [L, heads, V]."""
    tensors = load_file(head / "model.safetensors")
    count = 1 + max(int(key.removeprefix("blocks.").split(".")[0]) for key in tensors if not key.startswith("lm_"))
    said = []
    for place in range(count):
        x = hidden
        if f"blocks.{place}.up.weight" in tensors:
            up, down = (f"blocks.{place}.{name}" for name in ("up", "down"))
            inner = (x @ tensors[f"{up}.weight"].T + tensors[f"{up}.bias"]).relu()
            x = x + inner @ tensors[f"{down}.weight"].T + tensors[f"{down}.bias"]
        for layer in range(2):
            for name in (f"{place}.{layer}.linear", f"blocks.{place}.layers.{layer}"):
                if f"{name}.weight" in tensors:
                    x = x + torch.nn.functional.silu(x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"])
        own = [tensors[name] for name in (f"{place}.1.weight", f"lm_heads.{place}.weight") if name in tensors]
        said.append(x @ (own[0] if own else teacher.lm_head.weight).T)
    return torch.stack(said, 1)


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_the_graph_of_every_form_says_what_the_tensors_say(
    form: str, target: Path, teacher: Any, tmp_path: Path
) -> None:
    folder = parallel_heads(tmp_path / "head", target, **FORMS[form])
    head = loaded(folder, target, teacher, TOKENS)
    hidden = hidden_states(teacher, torch.tensor([TOKENS]))[0]
    features = head.features(hidden)[0]
    torch.testing.assert_close(features, hidden[-1][0], msg="the last hidden state, behind its norm")
    torch.testing.assert_close(head.module(features)[1], by_hand(folder, teacher, features))
    report, said = check(head, write(head, tmp_path / "heads"), TOKENS, features)
    assert report["worst_error"] < report["tolerance"] / 10
    torch.testing.assert_close(said, by_hand(folder, teacher, features)[:-1, 0], atol=1e-4, rtol=0)
    distribution = teacher(torch.tensor([TOKENS])).logits[0].softmax(-1)
    count = len(head.readings[f"{head.contract.layers} heads"])
    places = len(TOKENS) - count
    overlap = [
        float(
            torch.minimum(distribution[p + 1 : p + 1 + places], head.module(features)[1][:places, p].softmax(-1)).sum()
            / places
        )
        for p in range(count)
    ]
    assert head.readings[f"{count} heads"] == pytest.approx(overlap, abs=1e-5)


@pytest.mark.parametrize("kind", ["medusa", "blockwise"])
def test_the_check_of_heads_bites(kind: str, target: Path, teacher: Any, tmp_path: Path) -> None:
    head = loaded(parallel_heads(tmp_path / "head", target, kind), target, teacher, TOKENS)
    forward = ParallelHeads.forward

    def mixed_up(self: ParallelHeads, hidden: torch.Tensor) -> Any:
        states, logits = forward(self, hidden)
        return states, logits.flip(1)

    with patch.object(ParallelHeads, "forward", mixed_up):
        graph = write(head, tmp_path / kind)
    with pytest.raises(ExportError, match=f"the {kind} graph does not compute"):
        check(head, graph, TOKENS)


REFUSED: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "another target": (
        lambda each: each.update({"0.0.linear.weight": torch.ones(16, 16)}),
        r"blocks.0.layers.0.weight of head .* is \[16, 16\], expected \[32, 32\]; take the head of this target",
    ),
    "a head without its projection": (lambda each: each.pop("1.1.weight"), "lacks the tensor lm_heads.1.weight"),
    "fewer tokens": (
        lambda each: [each.update({f"{i}.1.weight": torch.ones(40, 32)}) for i in range(3)],
        "is for a target of 40 tokens, this one has 64",
    ),
    "a tensor too many": (lambda each: each.update(gate=torch.zeros(2)), "has the tensor gate"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_are_no_heads_of_this_target_is_refused(what: str, target: Path, teacher: Any, tmp_path: Path) -> None:
    change, message = REFUSED[what]
    head = parallel_heads(tmp_path / "head", target, "medusa")
    edit(head, change)
    with pytest.raises(ExportError, match=message):
        loaded(head, target, teacher, TOKENS)


def test_an_unknown_field_is_refused(target: Path, teacher: Any, tmp_path: Path) -> None:
    head = parallel_heads(tmp_path / "head", target, "medusa", medusa_gate=True)
    assert json.loads((head / "config.json").read_text())["medusa_gate"]
    with pytest.raises(ExportError, match="has the field 'medusa_gate'"):
        loaded(head, target, teacher, TOKENS)


@pytest.mark.parametrize(("kind", "least"), [("medusa", 0.3), ("blockwise", 0.35)])
def test_the_shipped_heads_overlap_with_their_target(kind: str, least: float) -> None:
    """The first more than the bigram's .3 of text that it was counted in, and each of them more than the next."""
    opened = open_checkpoint(TARGET)
    tokens = read_vocabulary(opened).tokenizer.encode(SHIPPED_SAMPLE.read_text()).ids[:512]
    found, contract = open_head(DEMO_DRAFTS[kind]), opened.shape.contract(1024, "float32")
    assert found is not None
    [shares] = found.kind.load(found, load_model(opened, "float32"), contract, Sample(tokens, 4096)).readings.values()
    assert len(shares) == 4
    assert shares[0] > least
    assert shares == sorted(shares, reverse=True)
