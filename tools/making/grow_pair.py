"""Grow a Llama checkpoint to a larger shape without changing the function it computes.

The residual dimensions that are added stay exactly zero, so text and acceptance are those of the small model while the
cost is that of the large one. Speculation can thus be timed at any size without a trained model of that size.

No two matrices are equal, as those of a trained model are not: a runtime may keep equal ones once, which costs less.

    python -m trt_spec.tools.making.grow_pair SOURCE OUT --hidden 768 --layers 12 --heads 12 --kv-heads 4 --mlp 2048

--head HEAD OUT grows a head of the checkpoint with it, and may be repeated.
"""

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ...engines.errors import RequestError
from ..flags.sampling import positive
from ..program import program
from .grow_head import grow_head
from .growing import Growth, LlamaSize, parts_of


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
    grown: dict[str, torch.Tensor] = {}
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="the checkpoint to grow")
    parser.add_argument("out", type=Path, help="where the grown checkpoint is written")
    for name in LlamaSize.__dataclass_fields__:
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, required=True, metavar="N")
    parser.add_argument(
        "--head", type=Path, nargs=2, action="append", default=[], metavar=("HEAD", "OUT"), help="a head of it, too"
    )


def run(arguments: argparse.Namespace) -> int:
    shape = LlamaSize(**{name: getattr(arguments, name) for name in LlamaSize.__dataclass_fields__})
    print(f"{grow(arguments.source, arguments.out, shape):,} parameters in {arguments.out}")
    for head, out in arguments.head:
        old = LlamaSize.of(json.loads((arguments.source / "config.json").read_text(encoding="utf-8")))
        print(f"{grow_head(head, out, old, shape):,} parameters in {out}")
    return 0


main = program("grow_pair", __doc__, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
