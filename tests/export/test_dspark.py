"""DSpark heads: read in every form, checked against the block in torch, their tables written beside the graph."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file
from trt_spec.engines import Bundle, BundleError, ExportError, Masks
from trt_spec.engines.bundle import TABLES
from trt_spec.export import export_bundle
from trt_spec.export.checking.oracle import hidden_states
from trt_spec.export.kinds.dspark import DSpark
from trt_spec.runtime import Decoder

from ..kit.heads import dflash_head
from ..kit.joining import HIDDEN, VOCAB, change, check, loaded, without, write

RANK = 6
TOKENS = [(7 * i * i + 3 * i) % (VOCAB - 1) for i in range(50)]
FORMS: dict[str, dict[str, Any]] = {
    "speculators": {"draft_vocab": 48},
    "its authors": {"form": "authors"},
    "the anchor is silent": {"sample_from_anchor": False},
    "a confidence of the hidden state alone": {"confidence": HIDDEN},
    "no confidence": {"confidence": 0, "form": "authors"},
}


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
def test_the_graph_of_every_form_says_what_the_block_says(
    form: str, target: Path, teacher: Any, tmp_path: Path
) -> None:
    found = loaded(dflash_head(tmp_path / "head", target, rank=RANK, **FORMS[form]), target, teacher, TOKENS)
    path = write(found, tmp_path / "dspark")
    stored = onnx.load(path, load_external_data=False).graph.initializer
    assert not [one.name for one in stored if "markov" in one.name or "confidence" in one.name]
    features = torch.randn(len(TOKENS), HIDDEN, generator=torch.Generator().manual_seed(0))
    report, said = check(found, path, TOKENS, features)
    assert report["worst_error"] < report["tolerance"] / 10
    first = found.module.said(torch.tensor(TOKENS), features, range(1, len(TOKENS)))[:, 0]
    torch.testing.assert_close(said, first, atol=1e-3, rtol=1e-3, msg="what the check returns follows the anchor")
    silent = form == "the anchor is silent"
    assert found.module.masks == Masks(63, 4, repeats=True, first=2 if silent else 1)


def test_the_check_compares_the_hidden_states_that_the_confidence_reads(
    target: Path, teacher: Any, tmp_path: Path
) -> None:
    found = loaded(dflash_head(tmp_path / "head", target, rank=RANK), target, teacher, TOKENS)
    path, blocks, logits = write(found, tmp_path / "dspark"), DSpark.blocks, found.module.logits
    with (
        patch.object(DSpark, "blocks", lambda self, *given: 1.1 * blocks(self, *given)),
        patch.object(DSpark, "logits", lambda self, normed: logits(normed / 1.1)),
        pytest.raises(ExportError, match="hidden states"),
    ):
        check(found, path, TOKENS)


@torch.no_grad()
def test_a_place_follows_the_token_before_it_and_its_confidence_reads_that_token(
    target: Path, teacher: Any, tmp_path: Path
) -> None:
    """By hand, with a draft vocabulary."""
    folder = dflash_head(tmp_path / "head", target, rank=RANK, draft_vocab=48, scale=0.3)
    head, tensors = loaded(folder, target, teacher, TOKENS).module, load_file(folder / "model.safetensors")
    own = tensors["d2t"] + torch.arange(48)
    features = torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(1))
    anchor = 11
    [states] = head.blocks(torch.tensor(TOKENS), features, [anchor])
    [said] = head.said(torch.tensor(TOKENS), features, [anchor])
    sure = head.confidence(states, torch.tensor(TOKENS[anchor : anchor + 5]))
    for place in range(5):
        before = tensors["markov_head.markov_w1.weight"][TOKENS[anchor + place]]
        expected = torch.full((VOCAB,), float(said.min()))
        expected[own] = tensors["lm_head.weight"] @ states[place] + tensors["markov_head.markov_w2.weight"] @ before
        torch.testing.assert_close(said[place], expected, atol=1e-4, rtol=1e-4)
        read = torch.cat([states[place], before])
        logit = tensors["confidence_head.proj.weight"][0] @ read + tensors["confidence_head.proj.bias"][0]
        assert float(sure[place]) == pytest.approx(float(logit.sigmoid()), abs=1e-5)
    assert said.min() < -1e3, "tokens that it does not know"


@torch.no_grad()
def test_overlap_is_that_of_distributions_that_follow_the_text(target: Path, teacher: Any, tmp_path: Path) -> None:
    found = loaded(dflash_head(tmp_path / "head", target, "authors", rank=RANK, scale=0.3), target, teacher, TOKENS)
    hidden, logits = hidden_states(teacher, torch.tensor([TOKENS]))
    anchors, head, distribution = list(range(1, len(TOKENS) - 5, 8)), found.module, logits[0].softmax(-1)
    states = head.blocks(torch.tensor(TOKENS), found.features(hidden)[0], anchors)
    [overlap] = found.readings.values()
    for place in range(5):
        before = torch.tensor([TOKENS[anchor + place] for anchor in anchors])
        said = head.following(head.logits(states[:, place]), before).softmax(-1)
        each = torch.minimum(distribution[[anchor + place for anchor in anchors]], said).sum()
        assert overlap[place] == pytest.approx(float(each) / len(anchors), abs=1e-5)


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a gate": (lambda head: change(head, markov_head_type="gated"), "has the markov_head_type 'gated', expected"),
    "a recurrent state": (lambda head: change(head, markov_head_type="rnn"), "has the markov_head_type 'rnn'"),
    "no Markov head": (lambda head: change(head, markov_rank=0), "has the markov_rank 0, expected 1 or more"),
    "another rank": (
        lambda head: change(head, markov_rank=8),
        r"markov_head.markov_w1.weight of head .* is \[64, 6\], expected \[64, 8\]",
    ),
    "a confidence of less": (
        lambda head: change(head, confidence_head_with_markov=False),
        r"confidence_head.proj.weight of head .* is \[1, 38\], expected \[1, 32\]",
    ),
    "no weights of the confidence": (
        lambda head: without(head, "confidence_head.proj.bias"),
        "lacks the tensor confidence_head.proj.bias",
    ),
    "layers of another family": (
        lambda head: change(
            head,
            speculators_model_type=None,
            architectures=["Gemma4DSparkModel"],
            transformer_layer_config={"model_type": "gemma4_text", "hidden_size": 32},
        ),
        "has layers of the type 'gemma4_text', expected llama or qwen3",
    ),
    "an unknown field": (lambda head: change(head, markov_gate=True), "has the field 'markov_gate'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_head_of_this_target_is_refused_in_a_sentence(
    what: str, target: Path, teacher: Any, tmp_path: Path
) -> None:
    damage, message = REFUSED[what]
    head = dflash_head(tmp_path / "head", target, rank=RANK)
    damage(head)
    with pytest.raises(ExportError, match=message):
        loaded(head, target, teacher, TOKENS)


def test_its_tables_are_files_of_the_bundle_and_what_does_not_fit_is_refused(target: Path, tmp_path: Path) -> None:
    head = dflash_head(tmp_path / "head", target, rank=RANK, draft_vocab=48)
    export_bundle(target, tmp_path / "bundle", head, dtype="bfloat16", check=False)
    bundle = Bundle.open(tmp_path / "bundle")
    assert f"dspark/{TABLES}" in bundle.files
    file = bundle.path / "dspark" / TABLES
    with np.load(file) as stored:
        tables = dict(stored)
    assert tables["before"].shape == (VOCAB, RANK)
    assert tables["after"].shape == (RANK, 48)
    for changed, message in (
        ({"tokens": tables["tokens"][:-1]}, "holds tables that do not fit together; export the bundle again"),
        ({"before": tables["before"][:, :-1]}, "holds tables that do not fit together"),
        ({"confidence": tables["confidence"][1:]}, "holds tables that do not fit together"),
        ({"tokens": tables["tokens"] - 60}, "holds tables that do not fit together"),
        ({"confidence": None}, "does not hold the tables of the dspark head"),
    ):
        np.savez(file, **{name: table for name, table in (tables | changed).items() if table is not None})
        bundle.save()
        with pytest.raises(BundleError, match=message):
            Decoder.open(bundle.path, engine="torch")
