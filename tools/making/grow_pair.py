"""Grow a Llama checkpoint to a larger shape without changing the function it computes.

The residual dimensions that are added stay exactly zero, so text and acceptance are those of the small model while the
cost is that of the large one. Speculation can thus be timed at any size without a trained model of that size.

No two matrices are equal, as those of a trained model are not: a runtime may keep equal ones once, which costs less.

    python -m trt_spec.tools.making.grow_pair SOURCE OUT --hidden 768 --layers 12 --heads 12 --kv-heads 4 --mlp 2048
"""

import argparse
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ...engines.errors import RequestError
from ..flags.sampling import positive
from ..program import program


@dataclass(frozen=True)
class LlamaSize:
    """The five numbers that decide what a Llama costs."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int

    @classmethod
    def of(cls, config: dict[str, int]) -> "LlamaSize":
        return cls(
            config["hidden_size"],
            config["num_hidden_layers"],
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["intermediate_size"],
        )


def place_heads(old: LlamaSize, new: LlamaSize) -> tuple[list[int], list[int]]:
    """Place every old query head, and say which old key-value head each new one that is used copies."""
    old_group, new_group = old.heads // old.kv_heads, new.heads // new.kv_heads
    slots: list[int] = []
    sources: list[int] = []
    for head in range(old.heads):
        kv_head, place = divmod(head, old_group)
        if place % new_group == 0:
            sources.append(kv_head)
        slots.append((len(sources) - 1) * new_group + place % new_group)
    if len(sources) > new.kv_heads:
        raise RequestError(
            f"{new.kv_heads} key-value heads for {new.heads} heads cannot hold the source's {old.heads} heads in "
            f"{old.kv_heads} groups: at least {len(sources)} key-value heads are needed"
        )
    return slots, sources


def grow(source: Path, out: Path, new: LlamaSize, dtype: torch.dtype = torch.float32) -> int:
    """Write `source` grown to `new` into `out` and return its number of parameters."""
    try:
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        kind = config.get("model_type")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise RequestError(
            f"{source / 'config.json'} is not a configuration ({error}); name the folder of a checkpoint"
        ) from error
    if kind != "llama":
        raise RequestError(f"{source} is a {kind!r} checkpoint, only llama can be grown")
    old = LlamaSize.of(config)
    for name in LlamaSize.__dataclass_fields__:
        if getattr(new, name) < getattr(old, name):
            raise RequestError(f"{name} {getattr(new, name)} is smaller than the source's {getattr(old, name)}")
    if new.heads % new.kv_heads:
        raise RequestError(f"{new.heads} heads are not a multiple of {new.kv_heads} key-value heads")
    head_dim = config["head_dim"]
    slots, sources = place_heads(old, new)
    query_rows = torch.cat([torch.arange(head_dim) + slot * head_dim for slot in slots])
    kv_rows = torch.arange(len(sources) * head_dim)
    kv_sources = torch.cat([torch.arange(head_dim) + head * head_dim for head in sources])

    weights = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    grown: dict[str, torch.Tensor] = {}

    def noise(*size: int) -> torch.Tensor:  # it multiplies zeros, so it may be anything ordinary
        return torch.randn(*size, generator=generator) * 0.02

    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            grown[name] = torch.zeros(weights[name].shape[0], new.hidden)
            grown[name][:, : old.hidden] = weights[name]
    norm_scale = (old.hidden / new.hidden) ** 0.5

    def norm(weight: torch.Tensor | None) -> torch.Tensor:
        out = torch.ones(new.hidden)
        if weight is not None:
            out[: old.hidden] = weight.float() * norm_scale
        return out

    grown["model.norm.weight"] = norm(weights["model.norm.weight"])
    for layer in range(new.layers):
        prefix = f"model.layers.{layer}."
        has = layer < old.layers
        for part in ("input_layernorm", "post_attention_layernorm"):
            grown[f"{prefix}{part}.weight"] = norm(weights[f"{prefix}{part}.weight"] if has else None)
        sizes = {
            "self_attn.q_proj": (new.heads * head_dim, new.hidden),
            "self_attn.k_proj": (new.kv_heads * head_dim, new.hidden),
            "self_attn.v_proj": (new.kv_heads * head_dim, new.hidden),
            "mlp.gate_proj": (new.mlp, new.hidden),
            "mlp.up_proj": (new.mlp, new.hidden),
        }
        for part, size in sizes.items():
            grown[f"{prefix}{part}.weight"] = noise(*size).to(dtype)
        attention_out = torch.zeros(new.hidden, new.heads * head_dim)
        mlp_out = torch.zeros(new.hidden, new.mlp)
        if has:
            old_weight = {part: weights[f"{prefix}{part}.weight"].float() for part in sizes}
            grown[f"{prefix}self_attn.q_proj.weight"][query_rows, : old.hidden] = old_weight["self_attn.q_proj"]
            for part in ("self_attn.k_proj", "self_attn.v_proj"):
                grown[f"{prefix}{part}.weight"][kv_rows, : old.hidden] = old_weight[part][kv_sources]
            for part in ("mlp.gate_proj", "mlp.up_proj"):
                grown[f"{prefix}{part}.weight"][: old.mlp, : old.hidden] = old_weight[part]
            attention_out[: old.hidden, query_rows] = weights[f"{prefix}self_attn.o_proj.weight"].float()
            mlp_out[: old.hidden, : old.mlp] = weights[f"{prefix}mlp.down_proj.weight"].float()
        else:  # what comes out is zero, because half of each product is zero on one side and half on the other
            grown[f"{prefix}self_attn.v_proj.weight"].view(new.kv_heads, head_dim, -1)[:, ::2] = 0
            attention_out[:, ::2] = noise(*attention_out[:, ::2].shape)
            grown[f"{prefix}mlp.up_proj.weight"][::2] = 0
            mlp_out[:, ::2] = noise(*mlp_out[:, ::2].shape)
        grown[f"{prefix}self_attn.o_proj.weight"] = attention_out
        grown[f"{prefix}mlp.down_proj.weight"] = mlp_out

    config |= {
        "hidden_size": new.hidden,
        "num_hidden_layers": new.layers,
        "num_attention_heads": new.heads,
        "num_key_value_heads": new.kv_heads,
        "intermediate_size": new.mlp,
        "rms_norm_eps": config["rms_norm_eps"] * old.hidden / new.hidden,
        "dtype": str(dtype).removeprefix("torch."),
    }
    grown = {name: weight.to(dtype) for name, weight in grown.items()}
    out.mkdir(parents=True, exist_ok=True)
    save_file(grown, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        if (source / name).exists():
            shutil.copyfile(source / name, out / name)
    return sum(weight.numel() for weight in grown.values())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="the checkpoint to grow")
    parser.add_argument("out", type=Path, help="where the grown checkpoint is written")
    for name in LlamaSize.__dataclass_fields__:
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, required=True, metavar="N")


def run(arguments: argparse.Namespace) -> int:
    shape = LlamaSize(**{name: getattr(arguments, name) for name in LlamaSize.__dataclass_fields__})
    print(f"{grow(arguments.source, arguments.out, shape):,} parameters in {arguments.out}")
    return 0


main = program("grow_pair", __doc__, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
