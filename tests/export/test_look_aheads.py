"""Look-aheads of PaSS: exported as further embeddings of their target, checked with it, or refused in a sentence."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from trt_spec.engines import Bundle, ExportError, blank_cache, make_step, open_engine
from trt_spec.export.checking.quality import Sample
from trt_spec.export.checkpoints.checkpoint import load_model, open_checkpoint
from trt_spec.export.checkpoints.vocabulary import read_vocabulary
from trt_spec.export.kinds import look_aheads as look_aheads_kind
from trt_spec.export.kinds import open_look_aheads
from trt_spec.export.passes.quantise import Quantisation
from trt_spec.export.pipeline import SAMPLE as SHIPPED_SAMPLE
from trt_spec.export.pipeline import export_bundle
from trt_spec.export.pipeline import model as export_model
from trt_spec.tools.making.kept_bundles import DEMO_DRAFTS, TARGET

from ..kit.heads import look_aheads, parallel_heads
from ..kit.models import tiny_gemma2, tiny_gpt2, tiny_llama

COUNT = 3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("ahead") / "target", padded_vocab=72)


@pytest.fixture
def head(tmp_path: Path, target: Path) -> Path:
    return look_aheads(tmp_path / "head", target, COUNT)


def logits_of(bundle: Path, tokens: list[int]) -> torch.Tensor:
    opened = Bundle.open(bundle)
    contract = opened.target.contract
    engine = open_engine("onnxruntime", opened.graph("target"), contract)
    said = torch.zeros(1, len(tokens), contract.vocab_size)
    inputs = {"input_ids": torch.tensor([tokens]), "start": torch.zeros(1, dtype=torch.int64)}
    make_step(engine, blank_cache(contract, 1, len(tokens)), inputs, {"logits": said}).run()
    engine.close()
    return said[0]


@pytest.mark.parametrize(
    ("make", "weights", "rank"),
    [
        (tiny_llama, "int8", 2),
        (tiny_gpt2, "none", 0),
        pytest.param(tiny_gpt2, "int8", 0, marks=pytest.mark.exhaustive),
        (tiny_gemma2, "none", 2),
    ],
)
def test_look_aheads_are_checked_with_their_target_whose_own_tokens_say_what_they_said(
    tmp_path: Path, make: Callable[..., Path], weights: str, rank: int
) -> None:
    """Also where embedding and vocabulary projection are one matrix, a model scales what it reads, or with a LoRA."""
    target = make(tmp_path / "target")
    head, how = look_aheads(tmp_path / "head", target, COUNT, rank=rank), Quantisation(weights)
    report = export_bundle(target, tmp_path / "bundle", head, weights=how)
    export_bundle(target, tmp_path / "alone", weights=how, check=False)
    entry = Bundle.open(tmp_path / "bundle").target
    assert entry.look_aheads == COUNT
    assert entry.check["errors"]["look-aheads"] <= entry.check["tolerance"]
    assert entry.contract == Bundle.open(tmp_path / "alone").target.contract
    [said] = [note for note in report.notes if "look-aheads" in note]
    assert said.startswith(f"{head} has 3 look-aheads: they overlap with their target by 0.")
    tokens = [7, 1, 30, 2, 9, 40]
    if weights == "none":  # else what was one matrix is quantised by rows and by columns, where it is two
        found, alone = (logits_of(tmp_path / folder, tokens) for folder in ("bundle", "alone"))
        if rank:  # queries, keys and values are products of their own
            torch.testing.assert_close(found, alone, atol=1e-4, rtol=1e-5)
        else:
            assert torch.equal(found, alone)
    model = load_model(open_checkpoint(target), "float32")
    opened = open_look_aheads(head)
    assert opened is not None
    vocab = entry.contract.vocab_size
    assert opened.join(model, vocab) == COUNT
    ahead = [*tokens, vocab, vocab + 1, vocab + 2]
    with torch.no_grad():
        expected = model(torch.tensor([ahead])).logits[0]
    if weights == "none":
        torch.testing.assert_close(logits_of(tmp_path / "bundle", ahead), expected, atol=2e-4, rtol=1e-4)


def test_look_aheads_go_beside_heads_that_share_the_targets_embedding(tmp_path: Path, target: Path, head: Path) -> None:
    other = parallel_heads(tmp_path / "medusa", target, "medusa", own_projections=False)
    export_bundle(target, tmp_path / "bundle", [head, other])
    bundle = Bundle.open(tmp_path / "bundle")
    assert (bundle.heads, bundle.target.look_aheads) == (("medusa",), COUNT)


def test_a_graph_that_reads_them_in_another_order_fails_its_check(
    tmp_path: Path, target: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = export_model.build_graph

    def shifted(model: Any, *arguments: Any) -> Any:
        rows = model.get_input_embeddings().weight.data[-COUNT:]
        rows.copy_(rows.roll(1, 0))
        return build(model, *arguments)

    monkeypatch.setattr(export_model, "build_graph", shifted)
    with pytest.raises(ExportError, match="in the scenario 'look-aheads' a logit is off by"):
        export_bundle(target, tmp_path / "bundle", head)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("fault", "scenario"), [("forgotten in one layer", "look-aheads"), ("added to all that is read", ".*")]
)
def test_a_graph_that_adds_a_lora_elsewhere_or_not_at_all_fails_its_check(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, fault: str, scenario: str
) -> None:
    head, build = look_aheads(tmp_path / "head", target, COUNT, rank=2), export_model.build_graph

    def faulty(model: Any, *arguments: Any) -> Any:
        if fault == "forgotten in one layer":
            model.get_submodule("model.layers.1.mlp.down_proj").ahead_up.data.zero_()
            return build(model, *arguments)
        with monkeypatch.context() as patched:
            patched.setattr(look_aheads_kind.Gate, "opens_to", lambda self, ids: ids >= 0)
            return build(model, *arguments)

    monkeypatch.setattr(export_model, "build_graph", faulty)
    with pytest.raises(ExportError, match=f"in the scenario '{scenario}' a logit is off by"):
        export_bundle(target, tmp_path / "bundle", head)
    assert not (tmp_path / "bundle").exists()


def with_fields(head: Path, **fields: Any) -> None:
    path = head / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def with_tensors(head: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(head / "model.safetensors")
    change(tensors)
    save_file(tensors, head / "model.safetensors")


WEIGHT, MLP, HALVES, BLANK = "look_aheads.weight", "model.layers.0.mlp.up_proj", ("down", "up"), torch.zeros(2, 32)
REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a field": (lambda head: with_fields(head, depth=3), "has the field 'depth' in its config.json, which this"),
    "a LoRA of what is no layer": (
        lambda head: with_tensors(
            head, lambda own: own.update({f"lora.model.norm.{one}": BLANK.clone() for one in HALVES})
        ),
        "adds to model.norm, which is no linear layer of its target",
    ),
    "a LoRA of the logits": (
        lambda head: with_tensors(
            head, lambda own: own.update({f"lora.lm_head.{one}": BLANK.clone() for one in HALVES})
        ),
        "adds to lm_head, which is no linear layer of its target before the logits",
    ),
    "half a LoRA": (
        lambda head: with_tensors(head, lambda own: own.update({f"lora.{MLP}.up": BLANK})),
        "holds one half of a LoRA of model.layers.0.mlp.up_proj, expected down and up",
    ),
    "a LoRA of another target": (
        lambda head: with_tensors(head, lambda own: own.update({f"lora.{MLP}.{one}": BLANK.clone() for one in HALVES})),
        r"adds \[2, 32\] and \[2, 32\] to model.layers.0.mlp.up_proj, whose matrix is \[64, 32\]",
    ),
    "a tensor": (
        lambda head: with_tensors(head, lambda own: own.update(more=torch.zeros(2))),
        r"holds the tensors \['look_aheads.weight', 'more'\], expected look_aheads.weight alone, or a LoRA beside it",
    ),
    "no tensor": (
        lambda head: with_tensors(head, lambda own: own.update(more=own.pop(WEIGHT))),
        r"holds the tensors \['more'\], expected look_aheads.weight alone",
    ),
    "another target": (
        lambda head: with_tensors(head, lambda own: own.update({WEIGHT: torch.zeros(3, 48)})),
        r"is \[3, 48\], and its target reads embeddings of 32 numbers; take the head of this target",
    ),
    "numbers": (
        lambda head: with_tensors(head, lambda own: own[WEIGHT][1].fill_(torch.nan)),
        "holds numbers that are not finite",
    ),
    "too few": (
        lambda head: with_fields(head, num_look_aheads=5),
        "holds 3 look-aheads and its config.json says 5, expected the same number from 1 to 16",
    ),
    "too many": (
        lambda head: (
            with_tensors(head, lambda own: own.update({WEIGHT: torch.zeros(17, 32)})),
            with_fields(head, num_look_aheads=17),
        ),
        "holds 17 look-aheads and its config.json says 17",
    ),
    "a pickle": (
        lambda head: (head / "model.safetensors").rename(head / "pytorch_model.bin"),
        r"has only pickled weights \(pytorch_model.bin\), which may run code when read",
    ),
    "a broken file": (
        lambda head: (head / "model.safetensors").write_bytes(b"\0" * 40),
        "weights of checkpoint .* cannot be read",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_are_no_look_aheads_of_the_target_is_refused_in_a_sentence(
    tmp_path: Path, target: Path, head: Path, what: str
) -> None:
    damage, said = REFUSED[what]
    damage(head)
    with pytest.raises(ExportError, match=said):
        export_bundle(target, tmp_path / "bundle", head, check=False)
    assert not (tmp_path / "bundle").exists()


def test_the_shipped_look_aheads_overlap_with_their_target_more_than_random_ones(tmp_path: Path) -> None:
    opened, shares = open_checkpoint(TARGET), []
    contract = opened.shape.contract(1024, "float32")
    text = Sample(read_vocabulary(opened).tokenizer.encode(SHIPPED_SAMPLE.read_text()).ids[:128], contract.vocab_size)
    for head in (DEMO_DRAFTS["pass"], look_aheads(tmp_path / "random", TARGET)):
        model, found = load_model(opened, "float32"), open_look_aheads(head)
        assert found is not None
        count = found.join(model, contract.vocab_size)
        said = found.measured(model, contract, text, count).partition("overlap with their target by ")[2]
        shares.append([float(share) for share in said.split(", then ")])
    assert len(shares[0]) == 4
    assert shares[0][0] > 0.4
    assert all(ours > random for ours, random in zip(*shares, strict=True))


def test_a_bundle_holds_one_set_of_look_aheads(tmp_path: Path, target: Path, head: Path) -> None:
    shutil.copytree(head, tmp_path / "other")
    with pytest.raises(ExportError, match=r"other and .*head are both look-aheads; name one"):
        export_bundle(target, tmp_path / "bundle", [head, tmp_path / "other"], check=False)
