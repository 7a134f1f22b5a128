"""Layers of multi-token prediction: read from files of their own and from their target's checkpoint, or refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel
from trt_spec.engines import Bundle, ExportError
from trt_spec.export import export_bundle
from trt_spec.export.checking.oracle import hidden_states
from trt_spec.export.checking.quality import Sample
from trt_spec.export.checkpoints.checkpoint import load_model, open_checkpoint
from trt_spec.export.kinds import open_head, open_look_aheads
from trt_spec.export.kinds.mtp import NORMED, PLAIN
from trt_spec.export.kinds.overlap import measured
from trt_spec.export.passes.quantise import Quantisation
from trt_spec.runtime import Decoder, SamplingParams

from ..kit.families import tiny_checkpoint
from ..kit.heads import mtp_head, with_mtp_layer, with_mtp_of_qwen
from ..kit.joining import VOCAB, change, check, edit, loaded, write
from ..kit.models import tiny_llama
from ..kit.quantised_models import KINDS, quantise
from ..kit.whole_models import whole_of

TOKENS = [(7 * i * i + 3 * i) % VOCAB for i in range(60)]
SAMPLE = Sample(TOKENS, VOCAB)
OTHERS = ("qwen3_5_moe_text", "qwen3_next")  # than the dense one
FORMS: dict[str, dict[str, Any]] = {
    "speculators": {},
    "layers of Llama": {"kind": "llama"},
    "names of Qwen": {"form": "qwen"},
}


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with such a layer behind its own two."""
    return with_mtp_layer(tiny_checkpoint("glm4_moe", tmp_path_factory.mktemp("glm") / "glm"))


@pytest.mark.parametrize("form", FORMS)
def test_the_graph_of_every_form_computes_what_the_layer_does(
    form: str, target: Path, teacher: Any, tmp_path: Path
) -> None:
    """Reading ragged rows, the last tokens again, its own states in a line and in a tree."""
    head = loaded(mtp_head(tmp_path / "head", target, **FORMS[form]), target, teacher, TOKENS)
    report, said = check(head, write(head, tmp_path / "mtp"), TOKENS)
    assert report["worst_error"] < report["tolerance"] / 10
    assert set(report["errors"]) == {"reading", "hidden states", "last tokens again", "line", "tree"}
    assert said.shape == (len(TOKENS) - 1, VOCAB)
    assert set(head.readings) == ({NORMED} if form != "names of Qwen" else {NORMED, PLAIN})


def test_a_head_has_one_table_where_its_target_has_one(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target", initializer_range=0.2, tie_word_embeddings=True)
    teacher = load_model(open_checkpoint(target), "float32")
    head = loaded(mtp_head(tmp_path / "head", target), target, teacher, TOKENS)
    report, _ = check(head, write(head, tmp_path / "mtp"), TOKENS)
    assert report["worst_error"] < report["tolerance"] / 10
    graph = onnx.load(tmp_path / "mtp" / "model.onnx", load_external_data=False).graph
    stored = [one.name for one in graph.initializer if one.name.startswith(("embed_tokens.", "lm_head."))]
    assert stored == [f"embed_tokens.weight{part}" for part in ("", ".flat", ".columns")], "a table and its sizes"


def test_names_of_others_are_told_apart(target: Path, teacher: Any, tmp_path: Path) -> None:
    one, other = (
        loaded(mtp_head(tmp_path / form, target, form), target, teacher, TOKENS) for form in ("speculators", "qwen")
    )
    for name, weight in one.module.state_dict().items():
        torch.testing.assert_close(weight, other.module.state_dict()[name], msg=name)


@pytest.mark.parametrize("files", ["one file", "several"])
def test_a_draft_of_the_hub_is_brought_before_it_is_known_by_its_tensors(
    files: str, target: Path, tmp_path: Path
) -> None:
    head, brought = mtp_head(tmp_path / "head", target, "qwen"), tmp_path / "brought"
    if files == "several":
        names = dict.fromkeys(load_file(head / "model.safetensors"), "model-1-of-1.safetensors")
        (head / "model.safetensors").rename(head / "model-1-of-1.safetensors")
        (head / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        for pattern in allow_patterns:
            for file in head.glob(pattern):
                brought.mkdir(exist_ok=True)
                shutil.copy(file, brought)
        return str(brought)

    with patch("huggingface_hub.snapshot_download", download):
        opened = open_head("someone/something", target)
        assert open_look_aheads("someone/something") is None
    assert opened is not None
    assert opened.kind.name == "mtp"


def test_what_is_read_behind_its_own_states_is_decided_by_overlap(target: Path, teacher: Any, tmp_path: Path) -> None:
    head = loaded(mtp_head(tmp_path / "head", target, "qwen", scale=0.4), target, teacher, TOKENS)
    assert len(head.notes) >= 2
    assert head.module.norm_output == (sum(head.readings[NORMED]) >= sum(head.readings[PLAIN]))
    found = {}
    for way, normed in ((NORMED, True), (PLAIN, False)):
        head.module.norm_output = normed
        found[way] = measured(head.module, head.features, teacher, SAMPLE)
    assert found == head.readings
    assert found[NORMED][0] == found[PLAIN][0]
    assert found[NORMED][1] != found[PLAIN][1], "the second place reads its own state"


@torch.no_grad()
def test_a_layer_in_its_targets_checkpoint_says_what_transformers_says(glm: Path, tmp_path: Path) -> None:
    teacher = load_model(open_checkpoint(glm), "float32")
    head = loaded(glm, glm, teacher, TOKENS)
    report, _ = check(head, write(head, tmp_path / "mtp"), TOKENS)
    assert report["worst_error"] < report["tolerance"] / 10
    theirs = AutoModelForCausalLM.from_pretrained(glm, dtype=torch.float32).eval()
    theirs._keys_to_ignore_on_load_unexpected = [r"layers\.2\."]
    layers = MtpModel.from_pretrained(theirs)
    ids = torch.tensor([TOKENS])
    last = hidden_states(theirs, ids)[0][-1]
    positions = torch.arange(1, len(TOKENS))[None]
    expected = layers.forward_layer(0, last[:, :-1], positions, None, input_ids=ids[:, 1:])
    [said] = head.module.unrolled(ids[:, 1:], head.features(hidden_states(teacher, ids)[0])[:, :-1], 1)
    torch.testing.assert_close(said, expected, atol=1e-4, rtol=1e-4)
    assert len(head.readings) == 2


def described(raw: dict[str, torch.Tensor], config: Any, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Say what Qwen's layer makes of embeddings [L, hidden] beside hidden states, written out from its tensors.

    What a norm multiplies by is stored less one.
    """
    weights = {name.removeprefix("mtp.").removesuffix(".weight"): value for name, value in raw.items()}
    mlp, heads, size, length = "layers.0.mlp", config.num_attention_heads, config.head_dim, len(hidden)

    def norm(name: str, given: torch.Tensor) -> torch.Tensor:
        return given * torch.rsqrt(given.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps) * (1 + weights[name])

    def product(name: str, given: torch.Tensor) -> torch.Tensor:
        return given @ weights[name].T

    def feed(part: str, given: torch.Tensor) -> torch.Tensor:
        gate = torch.nn.functional.silu(product(f"{part}.gate_proj", given))
        return product(f"{part}.down_proj", gate * product(f"{part}.up_proj", given))

    def turned(given: torch.Tensor) -> torch.Tensor:  # [L, heads, size], a quarter of which is turned
        half, theta = size // 8, config.rope_parameters["rope_theta"]
        angles = torch.arange(1, length + 1)[:, None] / theta ** (torch.arange(half) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        one, other, rest = given[..., :half], given[..., half : 2 * half], given[..., 2 * half :]
        return torch.cat([one * cos - other * sin, other * cos + one * sin, rest], -1)

    joined = torch.cat([norm("pre_fc_norm_embedding", embedded), norm("pre_fc_norm_hidden", hidden)], -1)
    stream = product("fc", joined)
    attention, read = "layers.0.self_attn", norm("layers.0.input_layernorm", stream)
    query, gate = product(f"{attention}.q_proj", read).view(length, heads, 2, size).unbind(2)
    key, value = (product(f"{attention}.{one}_proj", read).view(length, -1, size) for one in "kv")
    query, key = turned(norm(f"{attention}.q_norm", query)), turned(norm(f"{attention}.k_norm", key))
    key, value = (one.repeat_interleave(heads // key.shape[1], 1) for one in (key, value))
    scores = torch.einsum("ihd,jhd->hij", query, key) / size**0.5
    scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    answer = torch.einsum("hij,jhd->ihd", scores, value) * gate.sigmoid()
    stream = stream + product(f"{attention}.o_proj", answer.flatten(1))
    read = norm("layers.0.post_attention_layernorm", stream)
    if f"{mlp}.gate" not in weights:
        return norm("norm", stream + feed(mlp, read))
    shares, chosen = product(f"{mlp}.gate", read).softmax(-1).topk(config.num_experts_per_tok)
    shares = torch.zeros(length, config.num_experts).scatter_(1, chosen, shares / shares.sum(-1, keepdim=True))
    found = [share[:, None] * feed(f"{mlp}.experts.{one}", read) for one, share in enumerate(shares.T)]
    shared = product(f"{mlp}.shared_expert_gate", read).sigmoid() * feed(f"{mlp}.shared_expert", read)
    return norm("norm", stream + sum(found) + shared)


def qwen(kind: str, path: Path, fused: bool = False, **settings: Any) -> Path:
    """A target with recurrent layers and such a layer; Qwen3-Next does not say that it has one."""
    said = {} if kind == "qwen3_next" else {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
    return with_mtp_of_qwen(tiny_checkpoint(kind, path, **settings), fused=fused, **said)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
def test_a_layer_of_qwens_is_what_its_authors_describe(kind: str, tmp_path: Path) -> None:
    target = qwen(kind, tmp_path / "target")
    teacher = load_model(open_checkpoint(target), "float32")
    head = loaded(target, target, teacher, TOKENS)
    ids = torch.tensor([TOKENS])
    features = head.features(hidden_states(teacher, ids)[0])[:, :-1]
    [said] = head.module.unrolled(ids[:, 1:], features, 1)
    raw = {name: value for name, value in load_file(target / "model.safetensors").items() if name.startswith("mtp.")}
    expected = described(raw, teacher.config, teacher.get_input_embeddings()(ids[0, 1:]), features[0])
    torch.testing.assert_close(said[0], expected, atol=1e-4, rtol=1e-4)
    assert set(head.readings) == {NORMED, PLAIN}


def test_experts_of_a_layer_of_qwens_may_lie_in_one_tensor(tmp_path: Path) -> None:
    one, other = (qwen("qwen3_5_moe_text", tmp_path / str(fused), fused) for fused in (False, True))
    apart, fused = (loaded(each, each, load_model(open_checkpoint(each), "float32"), TOKENS) for each in (one, other))
    for name, weight in apart.module.state_dict().items():
        torch.testing.assert_close(weight, fused.module.state_dict()[name], msg=name)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_the_layer_of_a_checkpoint_that_reads_more_is_that_of_its_text_model(kind: str, tmp_path: Path) -> None:
    whole_of(kind, tmp_path / "target", num_experts=4, num_experts_per_tok=2)
    plain = load_model(open_checkpoint(tmp_path / "target"), "float32").state_dict()
    target = with_mtp_of_qwen(tmp_path / "target", mtp_num_hidden_layers=1)
    teacher, raw = load_model(open_checkpoint(target), "float32"), load_file(target / "model.safetensors")
    head = loaded(target, target, teacher, TOKENS)
    assert all(torch.equal(weight, plain[name]) for name, weight in teacher.state_dict().items())
    for name, theirs in (("eh_proj", "fc"), ("mtp_block.self_attn.q_norm", "layers.0.self_attn.q_norm")):
        assert torch.equal(head.module.state_dict()[f"layer.{name}.weight"], raw[f"mtp.{theirs}.weight"])


def test_a_target_whose_last_layer_is_recurrent_has_a_layer_with_the_norms_of_the_others(tmp_path: Path) -> None:
    target = qwen("qwen3_5_text", tmp_path / "target", layer_types=["full_attention", "linear_attention"])
    head = loaded(target, target, teacher := load_model(open_checkpoint(target), "float32"), TOKENS)
    assert type(head.module.layer.enorm) is type(head.module.layer.post_norm) is type(teacher.get_decoder().norm)


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", ["qwen3_5_text", *(pytest.param(kind, marks=pytest.mark.exhaustive) for kind in OTHERS)]
)
@pytest.mark.parametrize("weights", ["none", pytest.param("int8", marks=pytest.mark.exhaustive)])
def test_a_target_of_qwens_drafts_for_itself(kind: str, weights: str, tmp_path: Path) -> None:
    """Its table is its vocabulary projection, as those of the small ones are."""
    target = qwen(kind, tmp_path / "target", tie_word_embeddings=True)
    stored = Quantisation(weights)
    report = export_bundle(
        target, tmp_path / "bundle", target, text="abc def " * 40, weights=stored, draft_weights=stored
    )
    assert {"features", "tree", "draft's steps"} <= set(report.models[0].entry.check["errors"])
    assert report.models[1].entry.check["worst_error"] < report.models[1].entry.check["tolerance"] / 10
    assert 0 < report.overlap["mtp"][1.0] < 1
    prompt, params = [5, 9, 17], SamplingParams(max_new_tokens=24, ignore_eos=True)
    with Decoder.open(tmp_path / "bundle") as decoder:
        alone, line, tree = (decoder.generate([prompt], params, draft_length=k)[0] for k in (0, 3, "4/8"))
    assert alone.token_ids == line.token_ids == tree.token_ids
    assert line.speculation.proposed
    assert tree.speculation.proposed


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3"])
def test_a_target_drafts_for_itself(kind: str, tmp_path: Path) -> None:
    """The layer of DeepSeek-V3 keeps latents, as its target does, and both are published in FP8."""
    target = with_mtp_layer(tiny_checkpoint(kind, tmp_path / "target"))
    if kind == "deepseek_v3":
        quantise(KINDS["fp8 blocks"], target)
    report = export_bundle(target, tmp_path / "bundle", target, text="abc def " * 40)
    bundle = Bundle.open(tmp_path / "bundle")
    assert (bundle.names, bundle.heads) == (("target", "mtp"), ("mtp",))
    assert 0 < report.overlap["mtp"][1.0] < 1
    prompts, params = [[5, 9, 17], [3]], SamplingParams(max_new_tokens=24)
    with Decoder.open(bundle.path) as decoder:
        alone = decoder.generate(prompts, params, draft_length=0)
        found = decoder.generate(prompts, params, draft_length=3)
    assert [one.token_ids for one in found] == [one.token_ids for one in alone]
    assert all(one.speculation.proposed for one in found)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("deepseek_v3", "fp8 blocks"),
        ("qwen3_next", "fp8 blocks"),
        pytest.param("glm4_moe", "awq", marks=pytest.mark.exhaustive),
    ],
)
def test_a_layer_in_a_quantised_checkpoint_is_that_of_the_dequantised_one(kind: str, name: str, tmp_path: Path) -> None:
    """DeepSeek-V3 and Qwen3-Next are published in FP8, with a scale for each block."""
    make = qwen if kind == "qwen3_next" else lambda *where: with_mtp_layer(tiny_checkpoint(*where))
    path = make(kind, tmp_path / "target")
    plain = shutil.copytree(path, tmp_path / "plain")
    save_file(quantise(KINDS[name], path), plain / "model.safetensors", metadata={"format": "pt"})
    read, meant = (loaded(each, each, load_model(open_checkpoint(each), "float32"), TOKENS) for each in (path, plain))
    for tensor, weight in meant.module.state_dict().items():
        torch.testing.assert_close(read.module.state_dict()[tensor], weight, rtol=1e-6, atol=1e-7, msg=tensor)
    assert read.readings == meant.readings


def test_the_layer_changes_nothing_of_its_target(glm: Path, tmp_path: Path) -> None:
    plain = tiny_checkpoint("glm4_moe", tmp_path / "plain")
    one, other = (load_model(open_checkpoint(path), "float32").state_dict() for path in (glm, plain))
    assert set(one) == set(other)
    assert all(torch.equal(weight, other[name]) for name, weight in one.items())


# What is refused.


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "an unknown field": (lambda head: change(head, gate=True), "has the field 'gate'"),
    "another kind of layers": (
        lambda head: change(head, transformer_layer_config={"model_type": "qwen3_next"}),
        "has layers of the type 'qwen3_next', expected llama or qwen3",
    ),
    "several layers": (lambda head: change(head, num_nextn_predict_layers=3), "has 3 layers of MTP"),
    "a tensor missing": (
        lambda head: edit(head, lambda each: each.pop("mtp_layers.0.input_proj.weight")),
        "lacks the tensor layer.eh_proj.weight",
    ),
    "another target": (
        lambda head: change(
            head,
            transformer_layer_config={"model_type": "qwen3", "hidden_size": 48, "num_attention_heads": 4},
        ),
        "reads 48 numbers of each token of its target, whose hidden states have 32",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_layer_for_this_target_is_refused_in_a_sentence(
    what: str, target: Path, teacher: Any, tmp_path: Path
) -> None:
    damage, message = REFUSED[what]
    head = mtp_head(tmp_path / "head", target)
    damage(head)
    with pytest.raises(ExportError, match=message):
        loaded(head, target, teacher, TOKENS)


SCALES = "model.layers.2.eh_proj.weight_scale_inv"
OF_TARGET: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no weights": (
        lambda path: edit(path, lambda each: [each.pop(key) for key in list(each) if "layers.2." in key]),
        "the layer of MTP in .* cannot be read: .* are missing",
    ),
    "several": (lambda path: change(path, num_nextn_predict_layers=2), "has 2 layers of MTP"),
    "quantised by a method that nobody knows": (
        lambda path: change(path, quantization_config={"quant_method": "hqq"}),
        "is quantised by hqq, expected",
    ),
    "said to be quantised": (
        lambda path: change(path, quantization_config={"quant_method": "fp8"}),
        "says that it is quantised by fp8, but no tensor is",
    ),
    "quantised in a form that is not understood": (
        lambda path: (
            quantise(KINDS["fp8 blocks"], path),
            edit(path, lambda each: each.update({SCALES: torch.ones(1, 7)})),
        ),
        f"tensor {SCALES.removesuffix('_scale_inv')} of checkpoint .* cannot be dequantised",
    ),
}


@pytest.mark.parametrize("what", OF_TARGET)
def test_a_target_whose_layer_cannot_be_read_is_refused_in_a_sentence(what: str, tmp_path: Path) -> None:
    damage, message = OF_TARGET[what]
    target = with_mtp_layer(tiny_checkpoint("glm4_moe", tmp_path / "glm"))
    teacher = load_model(open_checkpoint(target), "float32")
    damage(target)
    with pytest.raises(ExportError, match=message):
        loaded(target, target, teacher, TOKENS)


OF_QWEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "left out when it was trained on": (
        lambda path: edit(path, lambda each: [each.pop(key) for key in list(each) if key.startswith("mtp.")]),
        "the layer of MTP in .* cannot be read: .* are missing",
    ),
    "a tensor missing": (
        lambda path: edit(path, lambda each: each.pop("mtp.fc.weight")),
        "the layer of MTP in .* cannot be read: .*eh_proj",
    ),
    "several": (lambda path: change(path, mtp_num_hidden_layers=2), "has 2 layers of MTP"),
    "an embedding of its own": (
        lambda path: change(path, mtp_use_dedicated_embeddings=True),
        "the layer of MTP in .* has an embedding of its own",
    ),
}


@pytest.mark.parametrize("what", OF_QWEN)
def test_a_layer_of_qwens_that_cannot_be_read_is_refused_in_a_sentence(what: str, tmp_path: Path) -> None:
    damage, message = OF_QWEN[what]
    target = qwen("qwen3_5_text", tmp_path / "target")
    teacher = load_model(open_checkpoint(target), "float32")
    damage(target)
    with pytest.raises(ExportError, match=message):
        loaded(target, target, teacher, TOKENS)


def test_a_target_without_such_a_layer_drafts_for_itself_as_a_model(target: Path) -> None:
    assert open_head(target, target) is None
