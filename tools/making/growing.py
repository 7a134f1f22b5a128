"""A Llama in a larger shape that computes the same: the dimensions that are added stay zero."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...engines.errors import RequestError


@dataclass(frozen=True)
class LlamaSize:
    """The five numbers that decide what a Llama costs."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    mlp: int

    @classmethod
    def of(cls, config: Mapping[str, int]) -> "LlamaSize":
        return cls(
            config["hidden_size"],
            config["num_hidden_layers"],
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["intermediate_size"],
        )

    @property
    def fields(self) -> dict[str, int]:
        """The same numbers, as configurations call them."""
        return {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.mlp,
        }


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


class Growth:
    """Grows the parts of one model from one size to another."""

    def __init__(self, old: LlamaSize, new: LlamaSize, head_dim: int) -> None:
        for name in LlamaSize.__dataclass_fields__:
            if getattr(new, name) < getattr(old, name):
                raise RequestError(f"{name} {getattr(new, name)} is smaller than the source's {getattr(old, name)}")
        if new.heads % new.kv_heads:
            raise RequestError(f"{new.heads} heads are not a multiple of {new.kv_heads} key-value heads")
        self.old, self.new, self._head_dim = old, new, head_dim
        slots, sources = place_heads(old, new)
        self._query_rows = torch.cat([torch.arange(head_dim) + slot * head_dim for slot in slots])
        self._kv_rows = torch.arange(len(sources) * head_dim)
        self._kv_sources = torch.cat([torch.arange(head_dim) + head * head_dim for head in sources])
        self._generator = torch.Generator().manual_seed(0)

    def noise(self, *size: int) -> Tensor:
        """Return what multiplies zeros, so that it may be anything ordinary."""
        return torch.randn(*size, generator=self._generator) * 0.02

    def norm(self, weight: Tensor | None) -> Tensor:
        """Return the weights of a norm: over more dimensions, of which those added are zero, the mean is smaller."""
        out = torch.ones(self.new.hidden)
        if weight is not None:
            out[: self.old.hidden] = weight.float() * (self.old.hidden / self.new.hidden) ** 0.5
        return out

    def reading(self, weight: Tensor, inputs: int = 1) -> Tensor:
        """Return a matrix that reads hidden states, as many side by side as there are inputs."""
        found = self.noise(len(weight), inputs * self.new.hidden)
        own = found.view(len(found), inputs, -1)
        own[:, :, : self.old.hidden] = weight.float().view(len(weight), inputs, -1)
        return found

    def writing(self, weight: Tensor) -> Tensor:
        """Return a matrix or a bias that makes hidden states: what it makes of the dimensions added is zero."""
        found = torch.zeros(self.new.hidden, *weight.shape[1:])
        found[: self.old.hidden] = weight.float()
        return found

    def layer(self, weights: Mapping[str, Tensor] | None, inputs: int = 1) -> dict[str, Tensor]:
        """Grow a layer by the names of its parts; None: make one that adds zero. Its attention reads so many inputs."""
        new, grown = self.new, dict[str, Tensor]()
        for part in ("input_layernorm", "post_attention_layernorm"):
            grown[f"{part}.weight"] = self.norm(weights[f"{part}.weight"] if weights else None)
        rows = {"q_proj": new.heads, "k_proj": new.kv_heads, "v_proj": new.kv_heads}
        for part, heads in rows.items():
            found = self.noise(heads * self._head_dim, inputs * new.hidden)
            if weights:
                own = found.view(len(found), inputs, -1)
                old = weights[f"self_attn.{part}.weight"].float().view(-1, inputs, self.old.hidden)
                places = self._query_rows if part == "q_proj" else self._kv_rows
                own[places, :, : self.old.hidden] = old if part == "q_proj" else old[self._kv_sources]
            grown[f"self_attn.{part}.weight"] = found
        for part in ("gate_proj", "up_proj"):
            found = self.noise(new.mlp, new.hidden)
            if weights:
                found[: self.old.mlp, : self.old.hidden] = weights[f"mlp.{part}.weight"].float()
            grown[f"mlp.{part}.weight"] = found
        attention_out = torch.zeros(new.hidden, new.heads * self._head_dim)
        mlp_out = torch.zeros(new.hidden, new.mlp)
        if weights:
            attention_out[: self.old.hidden, self._query_rows] = weights["self_attn.o_proj.weight"].float()
            mlp_out[: self.old.hidden, : self.old.mlp] = weights["mlp.down_proj.weight"].float()
        else:  # what comes out is zero, because half of each product is zero on one side and half on the other
            grown["self_attn.v_proj.weight"].view(new.kv_heads, self._head_dim, -1)[:, ::2] = 0
            attention_out[:, ::2] = self.noise(*attention_out[:, ::2].shape)
            grown["mlp.up_proj.weight"][::2] = 0
            mlp_out[:, ::2] = self.noise(*mlp_out[:, ::2].shape)
        return grown | {"self_attn.o_proj.weight": attention_out, "mlp.down_proj.weight": mlp_out}


def parts_of(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the weights whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


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
    growth, weights = Growth(old, new, config["head_dim"]), load_file(source / "model.safetensors")
    grown: dict[str, Tensor] = {}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            grown[name] = torch.zeros(weights[name].shape[0], new.hidden)
            grown[name][:, : old.hidden] = weights[name]
    grown["model.norm.weight"] = growth.norm(weights["model.norm.weight"])
    for layer in range(new.layers):
        prefix = f"model.layers.{layer}."
        own = growth.layer(parts_of(weights, prefix) if layer < old.layers else None)
        grown |= {f"{prefix}{part}": weight for part, weight in own.items()}
    config |= new.fields | {
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
