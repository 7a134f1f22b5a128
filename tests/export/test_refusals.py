"""What cannot be exported is refused by name, in one sentence, before any weight is read."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from trt_spec.engines import ExportError, TrtSpecError
from trt_spec.export import export_bundle
from trt_spec.export.checkpoints.agreement import difference
from trt_spec.export.checkpoints.checkpoint import load_model, open_checkpoint
from trt_spec.export.checkpoints.vocabulary import read_vocabulary

from ..kit.families import tiny_checkpoint
from ..kit.models import tiny_gemma2, tiny_gpt2, tiny_llama, write_tokenizer


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "llama")


def change(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def refusal(target: Path | str, error: type[TrtSpecError] = ExportError, **options: Any) -> str:
    """The sentence of a refused export; nothing but configurations and tokenizers may have been read."""
    stages: list[str] = []
    out = Path(options.pop("out", Path(target).parent / "bundle"))
    with pytest.raises(error) as caught:
        export_bundle(target, out, progress=stages.append, **options)
    assert len(stages) <= 1, f"refused only while {stages[-1]}"
    assert not out.exists()
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize(
    ("files", "what"),
    [
        (("openvino_model.xml", "openvino_model.bin", "config.json"), "a model of OpenVINO"),
        (("model.onnx", "config.json"), "a model in ONNX"),
        (("onnx/model.onnx", "config.json"), "a model in ONNX"),
        (("model.bin", "vocabulary.json", "config.json"), "a model of CTranslate2"),
        (("model.bin", "shared_vocabulary.json"), "a model of CTranslate2"),
        (("weights.npz", "config.json"), "a model of MLX"),
    ],
)
def test_what_another_program_has_made_is_named(tmp_path: Path, files: Sequence[str], what: str) -> None:
    for file in files:
        (tmp_path / "made" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "made" / file).write_text("{}")
    assert refusal(tmp_path / "made") == (
        f"checkpoint {tmp_path / 'made'} is {what}, expected a checkpoint as transformers writes it; name the model "
        "that it was made from"
    )


def test_a_checkpoint_without_a_tokenizer_is_refused_in_our_words(tmp_path: Path) -> None:
    checkpoint = tiny_llama(tmp_path / "checkpoint")
    for file in checkpoint.glob("*token*"):
        file.unlink()
    assert "has no tokenizer, expected tokenizer.json, tokenizer.model or vocab.json; copy" in refusal(checkpoint)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"model_type": "mamba"},
            "has the model type 'mamba', which cannot be exported: its layers keep a state",
        ),
        ({"model_type": None}, "says no model_type in its config.json"),
        (
            {"model_type": "longt5", "is_encoder_decoder": True},
            "which cannot be exported: its encoder, or the way in which its decoder asks it, is of a kind",
        ),
        ({"dtype": "float99"}, "has the dtype 'float99', which is no type of numbers, expected for instance bfloat16"),
        ({"torch_dtype": "save"}, "has the torch_dtype 'save', which is no type of numbers"),
        (
            {"quantization": {"group_size": 64, "bits": 4}},
            "is a model that MLX has quantised, expected a checkpoint as",
        ),
        ({"is_encoder_decoder": True}, "says that it is an encoder-decoder, which its type never is"),
        (
            {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "x.Y"}},
            "needs its own Python code (auto_map), which is never run",
        ),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "expected a causal LM with a vocabulary head",
        ),
        ({"architectures": "LlamaForCausalLM"}, "holds no architecture, expected a causal LM with a vocabulary head"),
        ({"architectures": [None]}, "expected a causal LM with a vocabulary head"),
        (
            {"model_type": "t5", "is_encoder_decoder": True, "architectures": ["T5EncoderModel"]},
            "holds T5EncoderModel, expected an encoder-decoder with a vocabulary head",
        ),
        ({"quantization_config": "fp8"}, "is quantised by some method, expected awq"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            "is quantised by hqq, expected awq",
        ),
        (
            {"rope_parameters": {"rope_type": "axial", "rope_theta": 1e4, "factor": 2.0}},
            "rotary scaling 'axial', which may change with the sequence's length and make cached keys wrong",
        ),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of the type linear_attention"),
        ({"num_hidden_layers": "two"}, "config.json of checkpoint"),
    ],
)
def test_unsupported_configuration_is_refused_by_name(llama: Path, fields: dict[str, Any], expected: str) -> None:
    change(llama / "config.json", **fields)
    sentence = refusal(llama)
    assert expected in sentence
    assert str(llama) in sentence


def test_a_length_that_turns_keys_by_other_factors_is_refused_with_the_reason(llama: Path) -> None:
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    change(llama / "config.json", rope_parameters=longrope | factors)
    why = "a text of more than 64 tokens turns its keys by other factors"
    assert f"--max-length 65 is 1 more than the 64 positions of {llama} ({why}); ask for" in refusal(
        llama, max_length=65
    )


def test_attention_to_an_encoder_or_in_both_directions_is_refused(tmp_path: Path) -> None:
    gpt2, gemma2 = tiny_gpt2(tmp_path / "gpt2"), tiny_gemma2(tmp_path / "gemma2")
    change(gpt2 / "config.json", add_cross_attention=True)
    assert "attends to an encoder (add_cross_attention)" in refusal(gpt2)
    change(gemma2 / "config.json", use_bidirectional_attention=True)
    assert "attends in both directions, expected causal attention" in refusal(gemma2)


def test_experts_of_doge_are_refused(tmp_path: Path) -> None:
    doge = tiny_checkpoint("doge", tmp_path / "doge")
    change(doge / "config.json", is_moe=True)
    assert "has experts that are code of its own (is_moe), expected a Doge without" in refusal(doge)


def remove(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def pickle_weights(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def lose_a_shard(path: Path) -> None:
    (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))


def list_shards(index: object) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        (path / "model.safetensors").unlink()
        text = index if isinstance(index, str) else json.dumps(index)
        (path / "model.safetensors.index.json").write_text(text)

    return damage


def make_an_adapter(path: Path) -> None:
    (path / "config.json").rename(path / "adapter_config.json")


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda path: (path / name).write_text(text) and None


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (remove("config.json"), "has no config.json, expected a checkpoint as transformers writes it"),
        (remove("model.safetensors"), "has no model.safetensors, expected the weights as safetensors"),
        (pickle_weights, "has only pickled weights (pytorch_model.bin), which may run code when read"),
        (lose_a_shard, "lacks the shard 'model-00002-of-00002.safetensors'"),
        (make_an_adapter, "is an adapter; name its base model, and the adapter by --lora"),
        (write("config.json", "{"), "is not JSON"),
        (write("config.json", "[]"), "is not a JSON object"),
        (write("tokenizer.json", "{}"), "the tokenizer of checkpoint"),
        (write("generation_config.json", "nonsense"), "generation_config.json of checkpoint"),
        (write("generation_config.json", "[]"), "is not a JSON object"),
        (write("tokenizer_config.json", "[" * 10_000), "tokenizer_config.json of checkpoint"),
        (lambda path: (path / "chat_template.jinja").write_bytes(b"\xff"), "chat_template.jinja of checkpoint"),
        (list_shards("{"), "model.safetensors.index.json of checkpoint"),
        (list_shards([]), "is not a JSON object"),
        (list_shards({}), "has no weight_map from tensors to files"),
        (list_shards({"weight_map": {}}), "has no weight_map from tensors to files"),
        (list_shards({"weight_map": ["a.safetensors"]}), "has no weight_map from tensors to files"),
        (list_shards({"weight_map": {"a": 1, "b": "b"}}), "has no weight_map from tensors to files"),
        (
            list_shards({"weight_map": {"a": "../b.safetensors"}}),
            "'../b.safetensors', which lies outside the checkpoint",
        ),
        (
            list_shards({"weight_map": {"a": "/b.safetensors"}}),
            "lists '/b.safetensors', which lies outside the checkpoint",
        ),
        (list_shards({"weight_map": {"a": "b.bin"}}), "lists 'b.bin', expected safetensors; convert it to them"),
        (list_shards({"weight_map": {"a": "\0.safetensors"}}), "lacks the shard '\\x00.safetensors'"),
    ],
)
def test_incomplete_or_damaged_checkpoint_is_refused(
    llama: Path, damage: Callable[[Path], None], expected: str
) -> None:
    damage(llama)
    assert expected in refusal(llama)


def test_an_index_beside_whole_weights_is_not_read(llama: Path) -> None:
    """transformers does not read it either."""
    (llama / "model.safetensors.index.json").write_text("{")
    open_checkpoint(llama)


def test_a_file_that_cannot_be_read_is_named_as_such(llama: Path) -> None:
    with patch.object(Path, "read_text", side_effect=PermissionError(13, "Permission denied")):
        assert "config.json of checkpoint" in (sentence := refusal(llama))
        assert "cannot be read (Permission denied); make it readable" in sentence


def test_a_library_that_fails_without_a_word_is_refused_by_the_kind_of_its_error(llama: Path, tmp_path: Path) -> None:
    with patch("huggingface_hub.snapshot_download", side_effect=TimeoutError()):
        assert "the Hugging Face Hub does not give it: TimeoutError" in refusal("someone/something", out=tmp_path / "b")
    with patch("transformers.AutoConfig.from_pretrained", side_effect=KeyError):
        assert "is refused by transformers: KeyError" in refusal(llama)
    with patch("tokenizers.Tokenizer.from_file", side_effect=MemoryError()):
        assert "cannot be read: MemoryError" in refusal(llama)
    with (
        patch("transformers.AutoModelForCausalLM.from_pretrained", side_effect=ValueError(" \n")),
        pytest.raises(ExportError, match=r"the weights of checkpoint .* cannot be read: ValueError"),
    ):
        load_model(open_checkpoint(llama), "float32")


@pytest.mark.parametrize("refused", ["target", "draft"])
def test_a_family_is_refused_before_any_weights_are_brought_from_the_hub(
    llama: Path, tmp_path: Path, refused: str
) -> None:
    for name in ("target", "draft"):
        shutil.copytree(llama, tmp_path / "hub" / name)
    change(tmp_path / "hub" / refused / "config.json", model_type="mamba")

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        assert "*.safetensors" not in allow_patterns, f"the weights of {name} are brought"
        return str(tmp_path / name)

    with patch("huggingface_hub.snapshot_download", download):
        sentence = refusal("hub/target", out=tmp_path / "bundle", draft="hub/draft")
    assert f"checkpoint hub/{refused} has the model type 'mamba', which cannot be exported" in sentence


def test_what_is_fetched_is_said_before_it_is(llama: Path, tmp_path: Path) -> None:
    said: list[str] = []

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        assert said == [f"reading configurations and tokenizers, and fetching {name} unless it is here"]
        raise TimeoutError

    with patch("huggingface_hub.snapshot_download", download), pytest.raises(ExportError, match="does not give it"):
        export_bundle("someone/something", tmp_path / "bundle", progress=said.append)
    with pytest.raises(ExportError, match="--max-length"):
        export_bundle(llama, tmp_path / "bundle", progress=said.append, max_length=10**9)
    assert said[1:] == ["reading configurations and tokenizers"]


def test_path_that_is_neither_directory_nor_hub_name_is_refused(tmp_path: Path) -> None:
    for missing in (tmp_path / "missing", "./missing", "~/missing"):
        assert "is neither a directory here nor a model's name" in refusal(missing, out=tmp_path / "bundle")


def test_truncated_weights_are_refused_when_they_are_read(llama: Path, tmp_path: Path) -> None:
    whole = (llama / "model.safetensors").read_bytes()
    (llama / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ExportError, match=r"the weights of checkpoint .* cannot be read"):
        export_bundle(llama, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_missing_tensor_is_refused_by_name(tmp_path: Path) -> None:
    llama = tiny_llama(tmp_path / "llama")
    weights = load_file(llama / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, llama / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExportError, match=r"lacks 1 tensors, the first is model\.layers\.1\.mlp\.up_proj\.weight"):
        export_bundle(llama, tmp_path / "bundle")


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (
            lambda weights: weights | {"model.layers.0.extra.weight": torch.ones(2)},
            "holds 1 tensors that a llama of its config.json does not have, the first is model.layers.0.extra.weight",
        ),
        (
            lambda weights: weights | {"model.norm.weight": weights["model.norm.weight"] * torch.nan},
            "tensor model.norm.weight of checkpoint",
        ),
        (
            lambda weights: weights | {"lm_head.weight": weights["lm_head.weight"] * torch.inf},
            "holds numbers that are not finite",
        ),
        (
            lambda weights: weights | {"model.layers.0.mlp.up_proj.weight": torch.ones(7, 32)},
            "cannot be read: ",
        ),
    ],
    ids=["extra tensor", "NaN", "infinity", "wrong shape"],
)
def test_weights_that_do_not_fit_the_configuration_or_are_no_numbers_are_refused(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], dict[str, Any]], expected: str
) -> None:
    checkpoint = tiny_llama(tmp_path / "checkpoint")
    file = checkpoint / "model.safetensors"
    save_file(spoil(load_file(file)), file, metadata={"format": "pt"})
    with pytest.raises(ExportError) as caught:
        export_bundle(checkpoint, tmp_path / "bundle")
    assert expected in str(caught.value)
    assert str(checkpoint) in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint"], "nothing is left behind"


def test_token_the_model_has_no_row_for_is_refused(llama: Path) -> None:
    write_tokenizer(llama, 70)
    assert "with id 69, its model has only 64; take the tokenizer that belongs to the model" in refusal(llama)


def test_first_differing_token_of_a_pair_is_named_with_both_ids(llama: Path, tmp_path: Path) -> None:
    draft = tiny_llama(tmp_path / "draft")
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["c"], vocab["f"] = vocab["f"], vocab["c"]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    sentence = difference(*(read_vocabulary(open_checkpoint(str(path))) for path in (llama, draft)))
    assert sentence == f"id 4 is 'c' in {llama} (id 7 in {draft}) but 'f' in {draft} (id 7 in {llama})"


def test_a_value_head_is_named(llama: Path, tmp_path: Path) -> None:
    file = llama / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"v_head.summary.weight": torch.zeros(1, 32)}, file, {"format": "pt"})
    with pytest.raises(ExportError, match=r"has a value head \(v_head\), as TRL trains it"):
        export_bundle(llama, tmp_path / "bundle")


def test_tokenizers_of_very_different_length_are_different(tmp_path: Path) -> None:
    target, draft = tiny_llama(tmp_path / "target", vocab=400), tiny_llama(tmp_path / "draft", vocab=300)
    sentence = difference(*(read_vocabulary(open_checkpoint(str(path))) for path in (target, draft)))
    assert sentence == f"{target} has 400 tokens, {draft} 300"


def test_padded_vocabulary_makes_no_difference(llama: Path, tmp_path: Path) -> None:
    padded = open_checkpoint(tiny_llama(tmp_path / "padded", padded_vocab=96))
    assert padded.shape.vocab_size == 96
    assert "--max-length 300" in refusal(llama, draft=tmp_path / "padded", max_length=300)  # the pair itself passed


def test_length_beyond_the_positions_is_refused_by_how_much(llama: Path, tmp_path: Path) -> None:
    draft = tiny_gpt2(tmp_path / "draft")
    sentence = refusal(llama, draft=draft, max_length=200)
    assert f"--max-length 200 is 72 more than the 128 positions of {draft}; ask for at most 128" in sentence
    assert "too short, expected at least 32" in refusal(llama, max_length=31)


def test_unknown_dtype_is_refused(llama: Path) -> None:
    assert "dtype is 'int3', expected float32, float16, bfloat16" in refusal(llama, dtype="int3")


def test_a_token_that_a_draft_lacks_in_between_is_named(llama: Path, tmp_path: Path) -> None:
    other = tiny_llama(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"].pop("U")
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    sentence = difference(*(read_vocabulary(open_checkpoint(str(path))) for path in (llama, other)))
    assert sentence == f"id 60 is 'U' in {llama} (not in {other}) but no token in {other}"


def test_more_than_four_drafts_are_refused_before_any_weight_is_read(tmp_path: Path) -> None:
    draft = tiny_llama(tmp_path / "draft")
    (draft / "model.safetensors").unlink()
    with pytest.raises(ExportError, match="there are 5 drafts, expected at most 4; leave the others out"):
        export_bundle(draft, tmp_path / "bundle", draft=5 * [draft])
