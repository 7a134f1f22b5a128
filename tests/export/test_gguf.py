"""GGUF files: what transformers reads of them is exported, with their tokenizer and chat template."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import decoders, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from trt_spec.engines import ExportError
from trt_spec.export import export_bundle
from trt_spec.export.checkpoint import open_checkpoint
from trt_spec.export.vocabulary import read_vocabulary
from trt_spec.runtime import Decoder, SamplingParams

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
NAMES = {  # of a layer's weights: as transformers and as GGUF have them
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
HEADS, KV_HEADS, DIM, LAYERS, FF, POSITIONS = 4, 2, 64, 2, 96, 128


def vocabulary() -> list[str]:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return ["<s>", "</s>", "<unk>", *letters, "ab", "cd"]


def write_gguf(path: Path, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32) -> Path:
    """A tiny random llama with byte-level tokens, as llama.cpp's converter writes one."""
    tokens = vocabulary()
    config = LlamaConfig(
        vocab_size=len(tokens),
        hidden_size=DIM,
        intermediate_size=FF,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=POSITIONS,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(DIM)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:  # llama.cpp rotates neighbours, transformers halves
            heads = HEADS if "q_proj" in name else KV_HEADS
            array = array.reshape(heads, 2, array.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(array.shape)
        stored = kind if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), gguf.quantize(np.ascontiguousarray(array), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in whole:
        return whole[name]
    if name == "lm_head.weight":
        return "output.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1"])
def test_its_greedy_text_is_that_of_the_dequantised_model(tmp_path: Path, kind: str) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType[kind])
    [target] = export_bundle(file, tmp_path / "bundle").models
    assert (target.entry.name, target.entry.architecture) == ("tiny", "llama")
    assert target.entry.check["worst_error"] < 2e-4
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32).eval()
    prompt = "abcdab cab"
    with Decoder.open(tmp_path / "bundle") as decoder:
        ids = torch.tensor([decoder.tokenizer.encode(prompt).ids])
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
        [output] = decoder.generate(prompt, SamplingParams(max_new_tokens=24), draft_length=3, drafter="lookup")
        assert list(output.token_ids) == expected[0, ids.shape[1] :].tolist()
        assert decoder.bundle.tokenizer.chat_template == TEMPLATE


def test_its_tokenizer_is_transformers_and_its_folder_stands_for_it(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf")
    read = read_vocabulary(open_checkpoint(tmp_path))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for text in ("abcd", "a b\n\u00e9 \U0001f600", "</s>x"):
        assert read.tokenizer.encode(text).ids == theirs(text).input_ids
        assert isinstance(read.tokenizer.decoder, decoders.ByteLevel)
    assert (read.bos_token_id, read.eos_token_ids) == (0, (1,))
    write_gguf(tmp_path / "other.gguf")
    with pytest.raises(ExportError, match=r"holds 2 GGUF files, the first is other\.gguf; name one"):
        open_checkpoint(tmp_path)


def test_what_is_none_or_cannot_be_read_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = tmp_path / "none.gguf"
    none.write_bytes(b"GGML and more")
    with pytest.raises(ExportError, match=r"none\.gguf is no GGUF file, whatever its name says"):
        open_checkpoint(none)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(write_gguf(tmp_path / "tiny.gguf").read_bytes()[:2000])
    with pytest.raises(ExportError, match=r"cut\.gguf of checkpoint .* is refused by transformers"):
        open_checkpoint(cut)
    monkeypatch.setattr("trt_spec.export.checkpoint.find_spec", lambda name: None)
    with pytest.raises(ExportError, match=r"needs gguf and accelerate to be read; pip install 'trt-spec\[export\]'"):
        open_checkpoint(tmp_path / "tiny.gguf")
