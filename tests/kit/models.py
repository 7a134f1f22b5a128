"""Makers of random checkpoints: small models of each family with a byte-level tokenizer, and one of a real size."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig

BOS, EOS = "<s>", "</s>"  # ids 0 and 1
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
COMMON = b"abcdefghijklmnopqrstuvwxyz \n0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ.,:;=()[]{}_'\"+-*/<>#"


def tiny_llama(path: Path, vocab: int = 64, padded_vocab: int | None = None, seed: int = 0, **config: Any) -> Path:
    """Two layers, grouped-query attention, rotary positions, an untied head."""
    fields = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "initializer_range": 0.4,
        "tie_word_embeddings": False,
    }
    return write_random(path, LlamaConfig(**_ids(vocab, padded_vocab) | fields | config), vocab, seed)


def tiny_gpt2(path: Path, vocab: int = 64, padded_vocab: int | None = None, seed: int = 0, **config: Any) -> Path:
    """Two layers, learned positions, biases everywhere, a tied head."""
    fields = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.4}
    return write_random(path, GPT2Config(**_ids(vocab, padded_vocab) | fields | config), vocab, seed)


def tiny_gemma2(path: Path, vocab: int = 64, padded_vocab: int | None = None, seed: int = 0, **config: Any) -> Path:
    """Two layers, one with a window of 8; low soft-caps, so that leaving one out would show; a tied head."""
    fields = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 12,
        "sliding_window": 8,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 8.0,
        "max_position_embeddings": 256,
        "initializer_range": 0.4,
    }
    return write_random(path, Gemma2Config(**_ids(vocab, padded_vocab) | fields | config), vocab, seed)


def large_llama(path: Path, layers: int = 16, dtype: torch.dtype = torch.bfloat16, vocab: int = 128256) -> Path:
    """The shape of Llama-3.2-1B with random weights, written tensor by tensor; no model is ever built."""
    config = LlamaConfig(
        **_ids(512, vocab),
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        dtype=str(dtype).removeprefix("torch."),
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    shapes = {"model.embed_tokens.weight": (vocab, 2048), "model.norm.weight": (2048,)}
    for layer in range(layers):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "self_attn.q_proj": (2048, 2048),
                "self_attn.k_proj": (512, 2048),
                "self_attn.v_proj": (512, 2048),
                "self_attn.o_proj": (2048, 2048),
                "mlp.gate_proj": (8192, 2048),
                "mlp.up_proj": (8192, 2048),
                "mlp.down_proj": (2048, 8192),
                "input_layernorm": (2048,),
                "post_attention_layernorm": (2048,),
            }.items()
        }
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.ones(shape, dtype=dtype)
        if len(shape) == 1
        else torch.empty(shape, dtype=dtype).normal_(std=0.02, generator=generator)
        for name, shape in shapes.items()
    }
    path.mkdir(parents=True)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(path)
    write_tokenizer(path, 512)
    return path


def write_tokenizer(path: Path, vocab: int) -> None:
    """`<s>`, `</s>`, then single bytes from the commonest on, then pairs of letters until there are `vocab` tokens."""
    symbol = bytes_to_symbols()
    alphabet = [symbol[byte] for byte in COMMON] + [symbol[byte] for byte in range(256) if byte not in COMMON]
    tokens = [BOS, EOS, *alphabet][:vocab]
    letters = alphabet[:26]
    merges = [(first, second) for first in letters for second in letters][: max(0, vocab - len(tokens))]
    tokens += [first + second for first, second in merges]
    assert len(tokens) == vocab, f"a tiny tokenizer has at most {len(tokens)} tokens, asked for {vocab}"
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.save(str(path / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    (path / "tokenizer_config.json").write_text(json.dumps(fields))


def bytes_to_symbols() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = iter(range(256, 512))
    return [chr(byte if byte in printable else next(unprintable)) for byte in range(256)]


def _ids(vocab: int, padded_vocab: int | None) -> dict[str, Any]:
    return {"vocab_size": padded_vocab or vocab, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}


def write_random(path: Path, config: Any, vocab: int, seed: int = 0) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:  # norms and biases start as ones and zeros, which would hide mistakes
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    write_tokenizer(path, vocab)
    return path
