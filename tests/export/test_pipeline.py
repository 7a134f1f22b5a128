"""From checkpoints to a bundle on disk, and that a failure anywhere leaves the disk as it was."""

import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import onnx
import pytest
import sentencepiece
import torch
from tokenizers import Tokenizer
from trt_spec.engines import Bundle, ExportError
from trt_spec.export import ExportReport, export_bundle
from trt_spec.export.checkpoints.agreement import refuse_unequal
from trt_spec.export.checkpoints.checkpoint import load_model, open_checkpoint
from trt_spec.export.checkpoints.vocabulary import read_vocabulary
from trt_spec.export.passes.quantise import Quantisation
from trt_spec.export.pipeline import SAMPLE
from trt_spec.export.writing.graph import write_fused
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.tools.exported import shown

from ..kit.families import tiny_checkpoint
from ..kit.machine_faults import no_file_larger_than
from ..kit.models import tiny_gemma2, tiny_gpt2, tiny_llama
from .contents import contents


def test_bundle_holds_both_models_the_tokenizer_and_what_made_it(exported: ExportReport) -> None:
    bundle = Bundle.open(exported.path)
    assert sorted(bundle.files) == [
        "draft/model.onnx",
        "draft/weights.bin",
        "target/model.onnx",
        "target/weights.bin",
        "tokenizer.json",
    ]
    assert bundle.target.architecture == "llama"
    assert bundle.draft is not None
    assert bundle.draft.architecture == "gpt2"
    assert bundle.target.contract.vocab_size == 72
    assert (bundle.tokenizer.vocab_size, bundle.tokenizer.bos_token_id, bundle.tokenizer.eos_token_ids) == (
        64,
        0,
        (1,),
    )
    assert bundle.max_length == bundle.target.contract.max_length == 128  # the draft's positions
    assert {"trt-spec", "torch", "transformers", "onnx", "onnxscript", "onnxruntime"} == set(bundle.made_by)
    assert Tokenizer.from_file(str(bundle.tokenizer_file)).encode("abc").ids == [2, 3, 4]


def test_result_of_the_check_is_stored_in_the_bundle(exported: ExportReport) -> None:
    bundle = Bundle.open(exported.path)
    for model in (bundle.target, bundle.draft):
        assert model is not None
        assert 0 < model.check["worst_error"] < model.check["tolerance"] / 10
        assert model.check["worst_error"] == max(model.check["errors"].values())
        assert model.check["as_float32_copy"] is False


def test_report_counts_nodes_bytes_and_rewrites(exported: ExportReport) -> None:
    target, draft = exported.models
    assert (target.role, draft.role) == ("target", "draft")
    assert target.fired["orient_weights"] == 8
    assert (target.fired["fuse_norms"], target.fired["fuse_rotary"]) == (3, 2)
    assert target.fired["merge_projections"] == 2
    assert target.weight_bytes == (exported.path / "target" / "weights.bin").stat().st_size
    assert exported.notes == []


@pytest.fixture(scope="module")
def two_drafts(tmp_path_factory: pytest.TempPathFactory) -> ExportReport:
    """A Llama of two layers, a shallower one and a GPT2 with fewer positions as its drafts."""
    folder = tmp_path_factory.mktemp("two_drafts")
    target = tiny_llama(folder / "target")
    drafts = [tiny_llama(folder / "shallow", seed=5, num_hidden_layers=1), tiny_gpt2(folder / "other", n_layer=1)]
    return export_bundle(target, folder / "bundle", draft=drafts, draft_weights=Quantisation("int8"))


def test_several_drafts_are_models_of_their_own_each_checked_and_measured(two_drafts: ExportReport) -> None:
    bundle = Bundle.open(two_drafts.path)
    assert bundle.names == ("target", "draft", "draft2")
    assert bundle.drafts == ("draft", "draft2")
    assert [model.kind for model in bundle.models.values()] == ["target", "draft", "draft"]
    assert [model.name for model in bundle.models.values()] == ["target", "shallow", "other"]
    assert bundle.draft is bundle.models["draft"]
    assert bundle.max_length == 128, "the positions of the second draft"
    for name, model in bundle.models.items():
        assert 0 < model.check["worst_error"] < model.check["tolerance"]
        assert (two_drafts.path / name / "model.onnx").is_file()
        assert model.weights == ("none" if name == "target" else "int8")
    assert list(two_drafts.overlap) == ["draft", "draft2"]
    assert two_drafts.overlap["draft"] != two_drafts.overlap["draft2"]
    assert all(0 < alphas[1.0] < 1 for alphas in two_drafts.overlap.values())
    for which in bundle.drafts:
        assert f"acceptance expected of {which} on the text: " in shown(two_drafts)


def test_exported_drafts_of_other_shapes_propose_to_the_same_text(two_drafts: ExportReport) -> None:
    params, prompts = SamplingParams(max_new_tokens=30, ignore_eos=True), [[5, 6, 7], [9] * 20]
    with Decoder.open(two_drafts.path) as decoder:
        plain = decoder.generate(prompts, params, draft_length=0)
        requests = [
            decoder.submit(prompt, params, drafter=drafter)
            for prompt, drafter in zip(prompts, ("model", "model2"), strict=True)
        ]
        while decoder.step():
            pass
    assert [request.output().token_ids for request in requests] == [one.token_ids for one in plain]
    assert all(request.speculation.proposed for request in requests)


@pytest.mark.exhaustive
def test_one_draft_alone_in_a_sequence_is_the_draft(tmp_path: Path) -> None:
    checkpoint = tiny_llama(tmp_path / "checkpoint", num_hidden_layers=1)
    contents_of = []
    for number, draft in enumerate((checkpoint, [str(checkpoint)])):
        report = export_bundle(checkpoint, tmp_path / str(number), draft=draft, check=False)
        assert report.overlap == {}
        contents_of.append(Bundle.open(report.path).files)
    assert contents_of[0] == contents_of[1]
    assert Bundle.open(export_bundle(checkpoint, tmp_path / "none", draft=[], check=False).path).drafts == ()


def test_half_precision_graph_is_checked_as_a_float32_copy_after_the_checkpoint_left_memory(tmp_path: Path) -> None:
    hidden, left = 40, []

    def of_this_width() -> list[torch.Tensor]:
        tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
        return [tensor for tensor in tensors if tensor.dim() == 2 and hidden in tensor.shape]

    def look(stage: str) -> None:
        if "checking" in stage:
            left.extend(tensor.shape for tensor in of_this_width() if id(tensor) not in of_others)

    checkpoint = tiny_gemma2(tmp_path / "checkpoint", num_hidden_layers=1, hidden_size=hidden)
    others = of_this_width()  # of earlier tests, and kept, so that no new tensor gets the id of one
    of_others = {id(tensor) for tensor in others}
    (target,) = export_bundle(checkpoint, tmp_path / "bundle", dtype="bfloat16", progress=look).models
    assert left == []
    assert target.entry.contract.dtype == "bfloat16"
    assert target.entry.check["as_float32_copy"] is True
    assert target.entry.check["worst_error"] < 5e-5  # on weights rounded alike nothing but float32 rounding is left
    assert (target.fired["fuse_norms"], target.fired["fuse_rotary"]) == (5, 2)
    assert sorted(file.name for file in (tmp_path / "bundle" / "target").iterdir()) == [
        "model.onnx",
        "weights.bin",
    ]
    assert target.weight_bytes == pytest.approx(2 * target.entry.parameters, rel=0.05)  # a tied head is stored once


@pytest.mark.usefixtures("shared_traces")
@pytest.mark.parametrize(
    ("stage", "size"),
    [
        ("reading", 1000),  # the tokenizer
        ("target: writing", 2000),  # the graph and its weights
        ("target: checking", 2000),  # the copy that is checked
        ("hashing", 200),  # the manifest
    ],
)
def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path, stage: str, size: int) -> None:
    checkpoint = tiny_llama(tmp_path / "checkpoint", num_hidden_layers=1)
    with ExitStack() as stack:

        def fill_up(reached: str) -> None:
            if reached.startswith(stage):
                stack.enter_context(no_file_larger_than(size))

        with pytest.raises(ExportError) as caught:
            export_bundle(checkpoint, tmp_path / "bundle", dtype="float16", progress=fill_up)
    assert str(caught.value) == f"cannot write bundle {tmp_path / 'bundle'}: File too large; nothing was left there"
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


def test_the_tokenizer_is_written_as_its_library_writes_it(exported: ExportReport, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(exported.path / "tokenizer.json"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert (exported.path / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()


@pytest.mark.exhaustive
def test_failure_in_the_second_model_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    draft = tiny_llama(tmp_path / "draft", num_hidden_layers=1)
    target = tiny_llama(tmp_path / "target", num_hidden_layers=1)
    weights = (draft / "model.safetensors").read_bytes()
    (draft / "model.safetensors").write_bytes(weights[:-100])
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ExportError, match=r"the weights of checkpoint .*draft cannot be read"):
        export_bundle(target, tmp_path / "bundle", draft=draft, check=False)
    assert sorted(tmp_path.iterdir()) == before


@pytest.fixture
def bundle(exported: ExportReport, tmp_path: Path) -> Path:
    shutil.copytree(exported.path, tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.mark.parametrize("fault", [KeyboardInterrupt(), RuntimeError("a bug"), OSError(28, "No space left on device")])
@pytest.mark.parametrize("stage", ["reading", "target: loading", "target: tracing"])
def test_interrupted_export_leaves_an_existing_bundle_untouched(
    bundle: Path, tmp_path: Path, fault: BaseException, stage: str
) -> None:
    checkpoint = tiny_llama(tmp_path / "checkpoint", num_hidden_layers=1)
    before, neighbours = contents(bundle), sorted(tmp_path.iterdir())

    def interrupt(reached: str) -> None:
        if reached.startswith(stage):
            raise fault

    with pytest.raises(ExportError if isinstance(fault, OSError) else type(fault)):
        export_bundle(checkpoint, bundle, progress=interrupt)
    assert contents(bundle) == before
    assert sorted(tmp_path.iterdir()) == neighbours


def attend_too_sharply(node: onnx.NodeProto) -> None:
    next(one for one in node.attribute if one.name == "scale").f *= 2


def attend_by_what_is_not_there(node: onnx.NodeProto) -> None:
    node.op_type = "GroupedQueryAttention"


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (attend_too_sharply, "the target graph does not compute what its checkpoint computes: in the scenario"),
        (attend_by_what_is_not_there, "GroupedQueryAttention"),
        (None, ""),
    ],
)
def test_a_graph_of_onnx_runtimes_own_that_fails_is_left_out_and_named_and_the_sound_one_stays(
    tmp_path: Path, spoil: Callable[[onnx.NodeProto], None] | None, why: str
) -> None:
    checkpoint = tiny_llama(tmp_path / "checkpoint", num_hidden_layers=1, head_dim=32, initializer_range=0.2)

    def write_spoilt(folder: Path) -> dict[str, int]:
        fired, file = write_fused(folder), folder / "onnxruntime.onnx"
        model = onnx.load(file, load_external_data=False)
        [node] = (node for node in model.graph.node if node.op_type == "GroupQueryAttention")
        if spoil is not None:
            spoil(node)
        onnx.save(model, file)
        return fired

    with patch("trt_spec.export.pipeline.model.write_fused", write_spoilt):
        report = export_bundle(checkpoint, tmp_path / "bundle")
    bundle = Bundle.open(report.path)
    assert ("target/onnxruntime.onnx" in bundle.files) == (bundle.path / "target/onnxruntime.onnx").exists()
    assert ("target/onnxruntime.onnx" in bundle.files) == (report.models[0].fired.get("group_queries") == 1)
    assert ("target/onnxruntime.onnx" in bundle.files) == (spoil is None)
    assert bundle.target.check["worst_error"] < bundle.target.check["tolerance"] / 10
    said = [line for line in shown(report).splitlines() if "onnxruntime.onnx" in line]
    assert len(said) == (spoil is not None)
    for line in said:
        assert line.startswith(
            "note: target/onnxruntime.onnx was left out, and ONNX Runtime will run the slower model.onnx: "
        )
        assert why in line


def test_end_tokens_come_from_the_generation_config_the_tokenizers_own_first(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "checkpoint")
    wrong: list[object] = [9999, "5", [5], None]
    for configured, expected in (([5, 1, 5], (1, 5)), (7, (1, 7)), (None, (1,)), (wrong, (1,))):
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": configured}))
        assert read_vocabulary(open_checkpoint(path)).eos_token_ids == expected


def test_the_defaults_of_sampling_come_from_the_generation_config(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "checkpoint")
    for configured, expected in (
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        ),
        ({"temperature": 0.6, "do_sample": False}, {"temperature": 0.0}),
        ({"min_p": None, "top_p": "much", "repetition_penalty": 1.1, "max_new_tokens": 9}, {"repetition_penalty": 1.1}),
        ({"eos_token_id": 1}, {}),
    ):
        (path / "generation_config.json").write_text(json.dumps(configured))
        assert read_vocabulary(open_checkpoint(path)).sampling == expected
        assert read_vocabulary(open_checkpoint(path)).entry().sampling == expected


HUB = """
from trt_spec.export.checkpoints.checkpoint import open_checkpoint
for revision in {}:
    opened = open_checkpoint('org/tiny@' + revision)
    print(opened.path.name, opened.label)
"""


def test_a_model_of_the_hub_is_read_as_it_is_at_a_revision(tmp_path: Path) -> None:
    kept = tmp_path / "hub" / "models--org--tiny"
    (kept / "refs").mkdir(parents=True)
    for revision, commit in (("main", "a" * 40), ("v1", "b" * 40)):
        (kept / "refs" / revision).write_text(commit)
        tiny_llama(kept / "snapshots" / commit)
    offline = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    program = HUB.format(["main", "v1", "b" * 40, "v2"])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=offline)
    assert done.stdout.splitlines() == [f"{commit} org/tiny" for commit in ("a" * 40, "b" * 40, "b" * 40)]
    assert "checkpoint org/tiny@v2 is not a directory here, and the Hugging Face Hub does not give it" in done.stderr


def test_truncation_and_padding_of_a_training_run_do_not_reach_the_bundle(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "checkpoint")
    left_over = Tokenizer.from_file(str(path / "tokenizer.json"))
    left_over.enable_truncation(2)
    left_over.enable_padding(length=9)
    left_over.save(str(path / "tokenizer.json"))
    assert read_vocabulary(open_checkpoint(path)).tokenizer.encode("abcd").ids == [2, 3, 4, 5]


def test_chat_template_is_read_from_its_file_before_the_settings(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "checkpoint")
    settings = json.loads((path / "tokenizer_config.json").read_text())
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "named"}]
    for template, expected in ((None, None), ("plain", "plain"), (named, "named")):
        (path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
        assert read_vocabulary(open_checkpoint(path)).chat_template == expected
    for template, expected in (([{"name": "rag", "template": "the first"}], "the first"),):
        (path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
        assert read_vocabulary(open_checkpoint(path)).chat_template == expected
    for damaged in ([{"name": "default"}], [{"template": "no"}], ["default"], {"default": "no"}):
        (path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": damaged}))
        assert read_vocabulary(open_checkpoint(path)).chat_template is None
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "chat_template.json").write_text(json.dumps({"chat_template": "a processor's"}))
    assert read_vocabulary(open_checkpoint(path)).chat_template == "a processor's"
    (path / "chat_template.jinja").write_text("file")
    assert read_vocabulary(open_checkpoint(path)).chat_template == "file"


def test_code_of_its_own_is_not_needed_where_transformers_knows_the_type(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "checkpoint")
    config = json.loads((path / "config.json").read_text())
    (path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (path / "config.json").write_text(json.dumps(config))
    load_model(open_checkpoint(path), "float32")
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_of_sentencepiece_alone_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "text"
    text.write_text(SAMPLE.read_text())
    trained = {"vocab_size": 400, "model_type": "bpe", "byte_fallback": True, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(input=str(text), model_prefix=str(tmp_path / "own"), **trained)
    path = tiny_llama(tmp_path / "checkpoint", vocab=400)
    (path / "tokenizer.json").unlink()
    shutil.copy(tmp_path / "own.model", path / "tokenizer.model")
    settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    found = read_vocabulary(open_checkpoint(path))
    own = sentencepiece.SentencePieceProcessor(model_file=str(path / "tokenizer.model"))
    for said in ("the first of them", "a line, and another."):
        assert found.tokenizer.encode(said, add_special_tokens=False).ids == own.encode(said)
    assert (found.bos_token_id, found.eos_token_ids[0]) == (1, 2)
    monkeypatch.setattr("trt_spec.export.checkpoints.vocabulary.find_spec", lambda name: None)
    (path / "tokenizer.model").write_bytes(b"damaged")
    with pytest.raises(ExportError, match=r"a file of sentencepiece, which is not installed"):
        read_vocabulary(open_checkpoint(path))


def test_where_texts_begin_and_end_is_the_targets_to_say(tmp_path: Path) -> None:
    target, draft = (read_vocabulary(open_checkpoint(tiny_llama(tmp_path / name))) for name in ("target", "draft"))
    notes = refuse_unequal(target, replace(draft, eos_token_ids=(1, 5), bos_token_id=None))
    assert notes == [
        "texts begin with 0, as the target's do; the draft's: None",
        "texts end with [1], as the target's do; the draft's: [1, 5]",
    ]


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_a_draft_reads_tokens_that_it_lacks_as_nothing_and_never_says_them(
    tmp_path: Path, make: Callable[..., Path]
) -> None:
    """Its head is shared with its embedding in one of them."""
    checkpoint = open_checkpoint(make(tmp_path / "draft", vocab=60))
    plain, longer = (load_model(checkpoint, "float32", size) for size in (0, 64))
    ids = torch.tensor([[5, 9, 17, 5, 59]])
    with torch.no_grad():
        expected, found = plain(ids).logits, longer(ids).logits
        unknown = longer(torch.tensor([[5, 63]])).logits
    torch.testing.assert_close(found[..., :60], expected, rtol=0, atol=1e-5)
    assert float(found.softmax(-1)[..., 60:].max()) == 0
    assert bool(unknown.isfinite().all())


def test_a_draft_that_caps_its_logits_could_not_keep_out_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="caps its logits, so that these could not be kept out"):
        load_model(open_checkpoint(tiny_gemma2(tmp_path / "draft", vocab=60)), "float32", 64)


def test_a_draft_that_reads_tokens_in_each_layer_could_not_read_what_it_lacks(tmp_path: Path) -> None:
    draft = tiny_checkpoint("gemma4_text", tmp_path / "draft")
    with pytest.raises(ExportError, match="reads tokens in each layer, which would have nothing for these"):
        load_model(open_checkpoint(draft), "float32", 65)


@pytest.mark.parametrize(("ours", "theirs"), [(64, 60), (60, 64)])
def test_a_draft_with_tokens_more_or_fewer_proposes_those_that_both_have(
    tmp_path: Path, ours: int, theirs: int
) -> None:
    target, draft = tiny_llama(tmp_path / "target", vocab=ours), tiny_llama(tmp_path / "draft", vocab=theirs)
    report = export_bundle(target, tmp_path / "bundle", draft=draft)
    more, less = (target, draft) if ours > theirs else (draft, target)
    assert f"{more} has 4 tokens that {less} lacks; no draft proposes them" in report.notes
    with Decoder.open(tmp_path / "bundle", max_batch=4) as decoder:
        for rule in ("coupled", "rejection"):
            params = SamplingParams(max_new_tokens=60, temperature=1.0, rule=rule, seed=1, ignore_eos=True)
            [plain] = decoder.generate([[5, 6, 7]], params, draft_length=0)
            [output] = decoder.generate([[5, 6, 7]], params, draft_length=4, trace=True)
            proposed = {token for one in output.trace for token in one.proposal}
            assert max(proposed) < min(ours, theirs)
            assert rule != "coupled" or output.token_ids == plain.token_ids
        params = SamplingParams(max_new_tokens=60, temperature=5.0, seed=1, ignore_eos=True)
        [output] = decoder.generate([[5, 6, 7]], params, draft_length=3)
        assert ours < theirs or max(output.token_ids) >= theirs, "the target still says what the draft lacks"


def test_different_chat_templates_are_noted(tmp_path: Path) -> None:
    target, draft = (read_vocabulary(open_checkpoint(tiny_llama(tmp_path / name))) for name in ("target", "draft"))
    assert refuse_unequal(target, draft) == []
    other = replace(draft, chat_template="{{ messages }}")
    assert refuse_unequal(target, other) == ["the chat templates differ; the target's is used"]
    assert refuse_unequal(other, draft) == [], "a draft that brings none has no other"


def test_check_without_onnx_runtime_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trt_spec.export.pipeline.settings.find_spec", lambda name: None)
    with pytest.raises(ExportError, match=r"needs ONNX Runtime, which is not installed; pip install 'trt-spec\[cpu\]'"):
        export_bundle(tmp_path / "any", tmp_path / "bundle")
