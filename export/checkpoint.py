"""A checkpoint on disk: found, and refused before any weight is read if it cannot be exported."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..engines import ExportError
from .families import Shape, refuse_unsupported, shape_of

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that can be exported, its weights still unread."""

    name: str  # as the user gave it
    path: Path
    config: Any
    shape: Shape

    @property
    def label(self) -> str:
        """What the bundle calls it: its id, or its directory's own name, which means something elsewhere too."""
        return Path(self.name).resolve().name if Path(self.name).is_dir() else self.name

    @property
    def architecture(self) -> str:
        return str(self.config.model_type)


def open_checkpoint(name: str | Path) -> Checkpoint:
    """Find a directory or a model of the Hugging Face Hub and read all of it but the weights."""
    name = str(name)
    path = Path(name) if Path(name).is_dir() else _download(name, SMALL_FILES)
    refuse_unsupported(name, _read_config(name, path))
    config = _typed_config(name, path)
    shape = shape_of(name, config)
    if not Path(name).is_dir():
        _download(name, ["*.safetensors"])
    _refuse_missing_weights(name, path)
    return Checkpoint(name, path, config, shape)


def load_model(checkpoint: Checkpoint, dtype: str) -> Any:
    """The model as transformers builds it, its weights in `dtype`, with transformers' own attention."""
    from transformers import AutoModelForCausalLM

    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            checkpoint.path,
            config=checkpoint.config,
            dtype=getattr(torch, dtype),
            attn_implementation="eager",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # safetensors, transformers and torch each have their own
        first_line = str(error).strip().splitlines()[0]
        raise ExportError(f"the weights of checkpoint {checkpoint.name} cannot be read: {first_line}") from error
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ExportError(
            f"checkpoint {checkpoint.name} lacks {len(missing)} tensors, the first is {missing[0]}; download it again"
        )
    if report["unexpected_keys"]:
        extra = sorted(report["unexpected_keys"])
        raise ExportError(
            f"checkpoint {checkpoint.name} holds {len(extra)} tensors that a {checkpoint.architecture} of its "
            f"config.json does not have, the first is {extra[0]}; take the config.json that belongs to the weights"
        )
    for name, weight in model.named_parameters():
        if not torch.stack(torch.aminmax(weight.detach())).isfinite().all():  # a NaN is both
            raise ExportError(
                f"tensor {name} of checkpoint {checkpoint.name} holds numbers that are not finite; take a sound one"
            )
    return model.eval()


def _download(name: str, patterns: list[str]) -> Path:
    if not HUB_ID.fullmatch(name):
        raise ExportError(f"checkpoint {name} is no directory, and no name of a model on the Hugging Face Hub")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ExportError(
            f"checkpoint {name} is no directory here, and the Hugging Face Hub does not give it: {reason}"
        ) from error


def _read_config(name: str, path: Path) -> dict[str, Any]:
    if not (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file():
            raise ExportError(f"checkpoint {name} is an adapter; merge it into its base model and export that")
        raise ExportError(f"checkpoint {name} has no config.json, expected a checkpoint as transformers writes it")
    try:
        fields = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ExportError(f"config.json of checkpoint {name} is no JSON ({error}); download it again") from error
    if not isinstance(fields, dict):
        raise ExportError(f"config.json of checkpoint {name} is no JSON object; download it again")
    return fields


def _typed_config(name: str, path: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each configuration class raises its own
        reason = " ".join(str(error).split())
        raise ExportError(f"config.json of checkpoint {name} is refused by transformers: {reason}") from error


def _refuse_missing_weights(name: str, path: Path) -> None:
    if (path / INDEX).is_file():
        shards = sorted(set(json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        missing = [shard for shard in shards if not (path / shard).is_file()]
        if missing:
            raise ExportError(f"checkpoint {name} lacks the shard {missing[0]} that {INDEX} lists; download it again")
    elif not (path / "model.safetensors").is_file():
        pickled = sorted(file.name for pattern in PICKLES for file in path.glob(pattern))
        if pickled:
            raise ExportError(
                f"checkpoint {name} has only pickled weights ({pickled[0]}), which may run code when read; "
                "convert them to safetensors"
            )
        raise ExportError(f"checkpoint {name} has no model.safetensors, expected the weights as safetensors")
