"""Find a checkpoint, refuse it before any weight is read if it cannot be exported, and load its weights."""

import json
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from ..engines import ExportError
from ..engines.errors import first_line, one_line
from .families import ModelShape, refuse_unsupported, shape_of

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"  # one file, or what lists several
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that can be exported, its weights still unread."""

    name: str  # as the user gave it
    path: Path
    config: Any
    shape: ModelShape

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
    """Load the model as transformers builds it, its weights in `dtype`, with transformers' own attention."""
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
        raise ExportError(f"the weights of checkpoint {checkpoint.name} cannot be read: {first_line(error)}") from error
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
        raise ExportError(f"checkpoint {name} is neither a directory here nor a model's name on the Hugging Face Hub")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise ExportError(
            f"checkpoint {name} is not a directory here, and the Hugging Face Hub does not give it: {first_line(error)}"
        ) from error


def read_object(name: str, file: Path) -> dict[str, Any]:
    """Read a JSON object that belongs to a checkpoint."""
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ExportError(
            f"{file.name} of checkpoint {name} cannot be read ({error.strerror}); make it readable"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{file.name} of checkpoint {name} is not JSON ({error}); download it again") from error
    if not isinstance(fields, dict):
        raise ExportError(f"{file.name} of checkpoint {name} is not a JSON object; download it again")
    return fields


def _read_config(name: str, path: Path) -> dict[str, Any]:
    if not (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file():
            raise ExportError(f"checkpoint {name} is an adapter; merge it into its base model and export that")
        raise ExportError(f"checkpoint {name} has no config.json, expected a checkpoint as transformers writes it")
    return read_object(name, path / "config.json")


def _typed_config(name: str, path: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each configuration class raises its own
        raise ExportError(f"config.json of checkpoint {name} is refused by transformers: {one_line(error)}") from error


def _refuse_missing_weights(name: str, path: Path) -> None:
    if (path / WEIGHTS).is_file():
        return
    if (path / INDEX).is_file():
        _refuse_missing_shards(name, path)
    else:
        pickled = sorted(file.name for pattern in PICKLES for file in path.glob(pattern))
        if pickled:
            raise ExportError(
                f"checkpoint {name} has only pickled weights ({pickled[0]}), which may run code when read; "
                "convert them to safetensors"
            )
        raise ExportError(f"checkpoint {name} has no {WEIGHTS}, expected the weights as safetensors")


def _refuse_missing_shards(name: str, path: Path) -> None:
    shards = read_object(name, path / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(shard, str) for shard in shards.values()):
        raise ExportError(
            f"{INDEX} of checkpoint {name} has no weight_map from tensors to files, expected one as transformers "
            "writes it; download it again"
        )
    for shard in sorted(set(shards.values())):
        place = PurePosixPath(shard)
        if place.is_absolute() or ".." in place.parts:
            raise ExportError(
                f"{INDEX} of checkpoint {name} lists {shard!r}, which lies outside the checkpoint; it is refused"
            )
        if place.suffix != ".safetensors":
            raise ExportError(f"{INDEX} of checkpoint {name} lists {shard!r}, expected safetensors; convert it to them")
        if not (path / shard).is_file():
            raise ExportError(f"checkpoint {name} lacks the shard {shard!r} that {INDEX} lists; download it again")
