"""EAGLE-3 heads in every form in which people publish them: read, wired by measurement, traced, checked, or refused."""

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import DynamicCache
from trt_spec.engines import Bundle, ExportError, PairError
from trt_spec.export import export_bundle
from trt_spec.export.checking.bigram import bigram_overlap
from trt_spec.export.checking.oracle import hidden_states
from trt_spec.export.checking.quality import Sample
from trt_spec.export.checkpoints.checkpoint import load_model, open_checkpoint
from trt_spec.export.checkpoints.unknown_tokens import UNKNOWN
from trt_spec.export.checkpoints.vocabulary import read_vocabulary
from trt_spec.export.kinds import LoadedHead, eagle3, open_head
from trt_spec.export.kinds.eagle3 import Eagle3, Wiring, in_words, wired
from trt_spec.export.kinds.overlap import measured
from trt_spec.export.passes.quantise import Quantisation
from trt_spec.export.pipeline import SAMPLE as SHIPPED_SAMPLE
from trt_spec.export.tracing.hidden_states import LAST, Features
from trt_spec.tools.making.kept_bundles import DEMO_DRAFTS, TARGET
from trt_spec.tools.measuring.pair_fit import examine_pair

from ..kit.heads import eagle3_head
from ..kit.joining import HIDDEN, VOCAB, change, check, edit, loaded, write
from ..kit.models import tiny_llama

TOKENS = [(7 * i * i + 3 * i) % VOCAB for i in range(60)]
SAMPLE = Sample(TOKENS, VOCAB)


FORMS: dict[str, dict[str, Any]] = {
    "speculators": {"draft_vocab": 48},
    "SpecForge": {"draft_vocab": 48, "form": "original"},
    "its own embedding, a norm of each": {"draft_vocab": 48, "own_embedding": True, "norms": "each"},
    "all tokens, a bias": {"bias": True},
    "layers of Qwen3, one norm before fc": {"kind": "qwen3", "norms": "input"},
    "P-EAGLE": {"draft_vocab": 48, "mask": 63, "layers": 2},
    "one hidden state": {"read": (2,), "eagle_aux_hidden_state_layer_ids": [2]},
}


@pytest.mark.parametrize("form", FORMS)
def test_the_graph_of_every_form_computes_what_the_head_does(
    form: str, target: Path, teacher: Any, tmp_path: Path
) -> None:
    """Reading ragged rows, the last tokens again, its own states in a line and in a tree."""
    head = loaded(eagle3_head(tmp_path / "head", target, **FORMS[form]), target, teacher, TOKENS)
    report, said = check(head, write(head, tmp_path / "eagle3"), TOKENS)
    assert report["worst_error"] < report["tolerance"] / 10
    calls = {"reading", "hidden states", "last tokens again", "line", "tree"}
    assert set(report["errors"]) == calls | ({"masks"} if "mask" in FORMS[form] else set())
    assert said.shape == (len(TOKENS) - 1, VOCAB)


@pytest.mark.parametrize(
    "fault", ["normed", "features late", "sees the first place", "map applied twice", "map left out"]
)
def test_the_check_of_a_head_bites(fault: str, target: Path, teacher: Any, tmp_path: Path) -> None:
    head = loaded(eagle3_head(tmp_path / "head", target, 48), target, teacher, TOKENS)
    forward, logits = Eagle3.forward, Eagle3.logits

    def faulty(self: Eagle3, ids: Any, features: Any, positions: Any, cache: Any) -> Any:
        if fault == "features late":
            features = torch.cat([features[:, 1:], features[:, -1:]], 1)
        made, normed = forward(self, ids, features, positions, cache)
        return (normed if fault == "normed" else made), normed

    def mapped(self: Eagle3, normed: Any) -> Any:
        said = logits(self, normed)
        if fault == "map left out":
            own = self.lm_head(normed)
            return torch.cat([own, torch.full_like(said[..., own.shape[-1] :], UNKNOWN)], -1)
        return said.index_select(-1, self.places.clamp(max=VOCAB - 1)) if fault == "map applied twice" else said

    seen = "trt_spec.export.kinds.slots.after_the_first"
    everything = patch(seen, lambda batch, head, query, key: key >= 0)
    with (
        patch.object(Eagle3, "forward", faulty),
        patch.object(Eagle3, "logits", mapped),
        everything if fault == "sees the first place" else nullcontext(),
    ):
        graph = write(head, tmp_path / "eagle3")
    with pytest.raises(ExportError, match="eagle3 graph does not compute what its checkpoint computes"):
        check(head, graph, TOKENS)


@pytest.mark.long
@pytest.mark.parametrize("weights", [pytest.param("none", marks=pytest.mark.exhaustive), "int8"])
def test_a_bundle_holds_a_head_beside_a_draft_all_checked(target: Path, tmp_path: Path, weights: str) -> None:
    head = eagle3_head(tmp_path / "head", target, 48)
    draft = tiny_llama(tmp_path / "draft", num_hidden_layers=1, seed=1)
    kind = Quantisation(weights)
    report = export_bundle(
        target, tmp_path / "bundle", [draft, head], weights=kind, draft_weights=kind, text="abc def " * 40
    )
    bundle = Bundle.open(tmp_path / "bundle")
    assert (bundle.names, bundle.heads) == (("target", "draft", "eagle3"), ("eagle3",))
    checks = {name: bundle.models[name].check for name in bundle.names}
    assert all(0 < check["worst_error"] < check["tolerance"] for check in checks.values())
    assert 0 < checks["target"]["errors"]["features"] < checks["target"]["tolerance"]
    assert 0 < report.overlap["eagle3"][1.0] < 1
    assert len(checks["eagle3"]["overlap"]) == 8, (
        "two layer ids, two residuals, its own state before its norm or behind"
    )
    assert any("overlaps with its target by" in note for note in report.notes)


@pytest.mark.exhaustive
def test_a_head_with_fewer_tokens_passes_its_check_in_bfloat16(target: Path, tmp_path: Path) -> None:
    head = eagle3_head(tmp_path / "head", target, 16)
    export_bundle(target, tmp_path / "bundle", head, dtype="bfloat16", text="abc def " * 40)
    assert Bundle.open(tmp_path / "bundle").models["eagle3"].check["worst_error"] > 0


def test_no_type_rounds_the_logit_of_unknown_tokens() -> None:
    assert all(torch.tensor(UNKNOWN, dtype=dtype) == UNKNOWN for dtype in (torch.float16, torch.bfloat16))


# What configurations leave open.


def test_every_way_to_wire_a_head_that_is_left_open_is_measured_and_the_best_is_taken(
    target: Path, teacher: Any, tmp_path: Path
) -> None:
    head = eagle3_head(tmp_path / "head", target, form="original", rope_parameters={"rope_theta": 5e5})
    found = loaded(head, target, teacher, TOKENS)
    ways = {
        in_words(Wiring(layers, residual, output, theta))
        for layers in ((0, 1, 2), (1, 2, 3))
        for residual in (False, True)
        for output in (False, True)
        for theta in (None, 1e4)
    }
    assert set(found.readings) == ways
    best = max(found.readings, key=lambda way: sum(found.readings[way]))
    assert best == in_words(found.module.wiring)
    assert best in found.notes[0]
    assert sum("not taken" in note for note in found.notes) == len(ways) - 1


def test_what_a_configuration_says_is_not_measured_again(target: Path, teacher: Any, tmp_path: Path) -> None:
    said = {"norm_before_residual": True, "norm_output": False}
    found = loaded(eagle3_head(tmp_path / "head", target, **said), target, teacher, TOKENS)
    assert {found.module.wiring.norm_before_residual, found.module.wiring.norm_output} == {True, False}
    assert len(found.readings) == 2, "layer ids as they are, or each one more"


def test_a_head_of_the_last_hidden_state_reads_it_behind_its_norm(target: Path, teacher: Any, tmp_path: Path) -> None:
    head = eagle3_head(
        tmp_path / "head",
        target,
        read=(0,),
        form="original",
        eagle_config={"use_aux_hidden_state": False},
    )
    found = loaded(head, target, teacher, TOKENS)
    assert found.features.layers == (LAST,)
    ids = torch.tensor([TOKENS])
    normed = teacher.model(ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(found.features(hidden_states(teacher, ids)[0]), found.module.encoder([normed]))


def test_overlap_is_that_of_slots_that_see_what_the_runtime_shows_them(
    target: Path, teacher: Any, tmp_path: Path
) -> None:
    """By hand: each slot alone, after all that the target has read, and the second after the first's own state."""

    found = loaded(eagle3_head(tmp_path / "head", target, scale=0.3), target, teacher, TOKENS)
    head, wiring = found.module, found.module.wiring
    tokens = TOKENS[:12]
    ids = torch.tensor([tokens])
    states, logits = hidden_states(teacher, ids)
    features = head.encoder([states[layer] for layer in wiring.layers])
    distribution, overlaps = logits[0].softmax(-1), ([], [])
    for last in range(1, len(tokens) - 2):
        given = torch.cat([torch.zeros(1, 1, HIDDEN), features[:, :last]], 1)
        cache = DynamicCache()
        made, normed = head(ids[:, : last + 1], given, torch.arange(last + 1)[None], cache)
        for place in range(2):
            q = head.logits(normed)[0, -1].softmax(-1)
            overlaps[place].append(float(torch.minimum(q, distribution[last + place]).sum()))
            ahead = last + place + 1
            made, normed = head(ids[:, ahead : ahead + 1], made[:, -1:], torch.tensor([[ahead]]), cache)
    expected = [sum(own) / len(own) for own in overlaps]
    features = Features(head.encoder, wiring.layers)
    assert measured(wired(head, wiring), features, teacher, Sample(tokens, VOCAB)) == pytest.approx(expected, abs=1e-5)


# What is refused.


def endless(tensors: dict[str, torch.Tensor]) -> None:
    tensors["norm.weight"][0] = torch.inf


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "an unknown field": (lambda head: change(head, gated_residual=True), "has the field 'gated_residual'"),
    "another kind of layers": (
        lambda head: change(head, transformer_layer_config={"model_type": "mamba"}),
        "has layers of the type 'mamba', expected llama or qwen3",
    ),
    "a window": (
        lambda head: change(head, transformer_layer_config={"layer_types": ["sliding_attention"]}),
        "see a sliding window",
    ),
    "layers that the target lacks": (
        lambda head: change(head, eagle_aux_hidden_state_layer_ids=[5, 6, 7]),
        "this target has 4 layers; take the head of this target",
    ),
    "a tensor missing": (lambda head: edit(head, lambda each: each.pop("norm.weight")), "lacks the tensor norm.weight"),
    "a tensor too many": (
        lambda head: edit(head, lambda each: each.update(gate=torch.zeros(2))),
        "has the tensor gate, which a head of its config.json does not have",
    ),
    "another shape": (
        lambda head: edit(head, lambda each: each.update({"norm.weight": torch.ones(7)})),
        r"tensor norm.weight of head .* is \[7\], expected \[32\]",
    ),
    "no numbers": (lambda head: edit(head, endless), "holds numbers that are not finite"),
    "another target": (
        lambda head: edit(head, lambda each: each.update({"fc.weight": torch.ones(32, 100)})),
        "reads 100 numbers of each token of its target, whose hidden states have 32",
    ),
    "offsets beyond the vocabulary": (
        lambda head: edit(head, lambda each: each["d2t"].add_(60)),
        "tensor d2t of head .* names no 48 tokens of 64",
    ),
    "ids for offsets": (
        lambda head: edit(head, lambda each: each["d2t"].add_(torch.arange(48))),
        "tensor d2t of head .* names no 48 tokens of 64",
    ),
    "no offsets": (
        lambda head: edit(head, lambda each: each["d2t"].zero_()),
        "tensors d2t and t2d of head .* name different tokens",
    ),
    "two vocabularies": (
        lambda head: edit(head, lambda each: each.update(t2d=~each["t2d"])),
        "tensors d2t and t2d of head .* name different tokens",
    ),
    "fewer tokens": (
        lambda head: edit(head, lambda each: each.update(t2d=each["t2d"][:40])),
        "is for a target of 40 tokens, this one has 64",
    ),
}


def test_parallel_eagle_without_its_mask_is_refused(target: Path, teacher: Any, tmp_path: Path) -> None:
    head = eagle3_head(tmp_path / "head", target, 48, mask=63)
    edit(head, lambda each: each.pop("mask_hidden"))
    with pytest.raises(ExportError, match="lacks the tensor mask_hidden"):
        loaded(head, target, teacher, TOKENS)
    change(head, mask_token_id=None)
    with pytest.raises(ExportError, match="has the mask_token_id None, expected one of its 64 tokens"):
        loaded(head, target, teacher, TOKENS)


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_head_of_this_target_is_refused_in_a_sentence(
    what: str, target: Path, teacher: Any, tmp_path: Path
) -> None:
    damage, message = REFUSED[what]
    head = eagle3_head(tmp_path / "head", target, 48)
    damage(head)
    with pytest.raises(ExportError, match=message):
        loaded(head, target, teacher, TOKENS)


def test_pickles_two_heads_of_a_kind_and_nothing_else_of_a_refused_export(target: Path, tmp_path: Path) -> None:
    head = eagle3_head(tmp_path / "head", target, 48)
    with pytest.raises(ExportError, match="are both eagle3 heads; name one"):
        export_bundle(target, tmp_path / "bundle", [head, head])
    (head / "model.safetensors").unlink()
    (head / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(ExportError, match=r"only pickled weights \(pytorch_model.bin\)"):
        export_bundle(target, tmp_path / "bundle", head)
    assert not (tmp_path / "bundle").exists()
    assert {file.name for file in tmp_path.iterdir()} == {"head"}


def test_a_head_of_a_kind_that_cannot_be_run_is_refused_by_its_name(target: Path, tmp_path: Path) -> None:
    head = eagle3_head(tmp_path / "head", target, 48)
    change(head, speculators_model_type="xpress", architectures=["XpressSpeculator"])
    with pytest.raises(
        ExportError, match="is a head of the kind 'xpress', which this version cannot run; it runs peagle"
    ):
        export_bundle(target, tmp_path / "bundle", head)


def test_a_model_of_its_own_is_no_head(target: Path) -> None:
    assert open_head(target) is None


def test_a_head_alone_is_no_target_and_doctor_says_where_it_is_measured(target: Path, tmp_path: Path) -> None:
    head = eagle3_head(tmp_path / "head", target, 48)
    with pytest.raises(ExportError, match="a head is exported beside its target, by --draft"):
        export_bundle(head, tmp_path / "bundle")
    with pytest.raises(PairError, match="is a head of the kind eagle3, which export-models measures"):
        examine_pair(str(target), str(head), None)


def test_the_shipped_head_is_wired_as_it_was_trained_whatever_its_configuration_leaves_out(tmp_path: Path) -> None:
    """Ids one too small, as readers that count from one write them, and no word of its norms."""
    head = shutil.copytree(DEMO_DRAFTS["eagle3"], tmp_path / "head")
    fields = json.loads((head / "config.json").read_text())
    for name in ("norm_before_residual", "norm_output"):
        fields.pop(name, None)
    fields["eagle_aux_hidden_state_layer_ids"] = [1, 3, 4]
    (head / "config.json").write_text(json.dumps(fields))
    joined = beside_the_demo(head)
    assert joined.module.wiring == Wiring((2, 4, 5))
    assert len(joined.readings) == 8
    best, *others = sorted(joined.readings.values(), reverse=True)
    assert best[0] > 0.3
    assert sum(best) > 1.05 * sum(others[0])


def beside_the_demo(head: Path) -> LoadedHead:
    """Join a head to the demo's target, measured on the text that is shipped and compared with a bigram of it."""
    opened, found = open_checkpoint(TARGET), open_head(head)
    assert found is not None
    sample = Sample(read_vocabulary(opened).tokenizer.encode(SHIPPED_SAMPLE.read_text()).ids[:1024], 4096)
    target, contract = load_model(opened, "float32"), opened.shape.contract(1024, "float32")
    return found.kind.load(found, target, contract, sample).beside("the head", bigram_overlap(target, sample))


@pytest.mark.parametrize("fault", [None, "twice", "left out"])
def test_a_draft_vocabulary_that_is_read_wrongly_shows_in_the_overlap(fault: str | None) -> None:
    """The check cannot see it, which compares with the head as it was read, nor can a certificate: it is exact."""
    read = eagle3.draft_vocabulary

    def wrongly(name: str, tensors: dict[str, torch.Tensor], vocab: int) -> torch.Tensor:
        places = read(name, tensors, vocab)
        if fault == "twice":
            return places[places.clamp(max=vocab - 1)]
        return torch.arange(vocab).clamp(max=len(tensors["d2t"])) if fault == "left out" else places

    with patch.object(eagle3, "draft_vocabulary", wrongly):
        noted = any("no better than a bigram" in note for note in beside_the_demo(DEMO_DRAFTS["eagle3"]).notes)
    assert noted == (fault is not None)
