"""Drafts with tokens of their own: a target under other numbers, and tiny models that merge letters."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from .models import BOS, COMMON, EOS, bytes_to_symbols, tiny_llama

BY_TOKEN = ("model.embed_tokens.weight", "lm_head.weight")


def in_other_tokens(checkpoint: Path, out: Path) -> Path:
    """The same model with its tokens numbered backwards."""
    shutil.copytree(checkpoint, out)
    weights = load_file(out / "model.safetensors")
    for name in BY_TOKEN:
        weights[name] = weights[name].flip(0).contiguous()
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    fields = json.loads((out / "tokenizer.json").read_text())
    most = len(weights[BY_TOKEN[0]]) - 1
    fields["model"]["vocab"] = {token: most - index for token, index in fields["model"]["vocab"].items()}
    fields["added_tokens"] = [token | {"id": most - token["id"]} for token in fields["added_tokens"]]
    (out / "tokenizer.json").write_text(json.dumps(fields))
    config = json.loads((out / "config.json").read_text())
    config |= {name: most - config[name] for name in ("bos_token_id", "eos_token_id")}
    (out / "config.json").write_text(json.dumps(config))
    (out / "generation_config.json").unlink(missing_ok=True)
    return out


def padded(checkpoint: Path, out: Path, rows: int) -> Path:
    """The same model with so many rows in its embedding, of which the last belong to no token."""
    shutil.copytree(checkpoint, out)
    weights = load_file(out / "model.safetensors")
    for name in BY_TOKEN:
        own = weights[name][:rows]
        weights[name] = torch.cat([own, own.flip(0)])[:rows].contiguous()
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
    return out


def merging_draft(out: Path, letters: bytes = COMMON, pairs: bytes = COMMON[:8], seed: int = 1, **config: int) -> Path:
    """A tiny model whose tokens are these letters, and all pairs of some; `</s>` comes first."""
    symbol = bytes_to_symbols()
    alphabet = [symbol[byte] for byte in letters]
    merges = [(symbol[one], symbol[other]) for one in pairs for other in pairs]
    tokens = [EOS, *(one + other for one, other in merges), *alphabet, BOS]
    tiny_llama(out, vocab=len(tokens), seed=seed, num_hidden_layers=1, **config)
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.save(str(out / "tokenizer.json"))
    fields = json.loads((out / "config.json").read_text()) | {"bos_token_id": len(tokens) - 1, "eos_token_id": 0}
    (out / "config.json").write_text(json.dumps(fields))
    (out / "generation_config.json").unlink(missing_ok=True)
    return out
