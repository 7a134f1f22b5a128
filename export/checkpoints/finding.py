"""Finds what a checkpoint's name stands for, and reads its config.json, before anything heavy is loaded."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...engines import ExportError
from ...engines.errors import first_line
from .reading import read_object

PART = r"\b[\w.-]{1,96}\b"
HUB_ID = re.compile(  # as the Hub allows them, and a branch, a tag or a commit
    rf"(?![^@]*(?:--|\.\.))(?P<id>(?:{PART}/)?{PART})(?<!\.git)(?:@(?P<revision>[\w./-]+))?"
)
SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.spm", "*.txt"]
MODEL_OPTIMIZER = "hf_quant_config.json"  # where older versions of it write what they have done
GGUF = ".gguf"
SHORTEST_MAX_LENGTH = 32  # a bundle whose sequences are shorter cannot hold one round of the widest draft

OTHER_FORMATS = {  # by their files, where there are no safetensors
    "openvino_model.xml": "a model of OpenVINO",
    "*.onnx": "a model in ONNX",
    "onnx/*.onnx": "a model in ONNX",
    "model.bin": "a model of CTranslate2",
    "weights*.npz": "a model of MLX",
    "*.tflite": "a model of LiteRT",
}


def require_found(name: str, longest: int | None = None) -> None:
    """Refuse a name that stands for nothing, a folder without a config.json, and texts that are too long for it."""
    if gguf_file(name) is not None:
        return
    fields = read_config(name, Path(name) if Path(name).is_dir() else download(name, SMALL_FILES))
    inner = fields.get("text_config")
    positions = (inner if isinstance(inner, dict) else fields).get("max_position_embeddings")
    if longest is not None:
        refuse_length(name, positions if type(positions) is int else longest, longest)


def require_pair_found(target: str, drafts: Sequence[str], longest: int | None) -> None:
    """Refuse names that stand for no target, or for no draft or head, of which a folder may hold other files."""
    require_found(target, longest)
    for draft in drafts:
        place = Path(draft)
        if not place.is_dir() or not any(place.iterdir()):
            require_found(draft)


def refuse_length(name: str, positions: int, asked: int, why: str = "") -> None:
    """Refuse a --max-length for which a model has no positions, or which holds no round."""
    if asked > positions:
        raise ExportError(
            f"--max-length {asked} is {asked - positions} more than the {positions} positions of {name}{why}; "
            f"ask for at most {positions}"
        )
    if asked < SHORTEST_MAX_LENGTH:
        raise ExportError(f"a maximum length of {asked} is too short, expected at least {SHORTEST_MAX_LENGTH}")


def gguf_file(name: str) -> Path | None:
    """Return the GGUF file that a name stands for: its own, or the only one in a folder that has no config.json."""
    place = Path(name)
    if place.is_file() and place.suffix == GGUF:
        return place
    files = sorted(place.glob(f"*{GGUF}")) if place.is_dir() and not (place / "config.json").exists() else []
    if len(files) > 1:
        raise ExportError(f"checkpoint {name} holds {len(files)} GGUF files, the first is {files[0].name}; name one")
    return files[0] if files else None


def download(name: str, patterns: list[str]) -> Path:
    hub = HUB_ID.fullmatch(name)
    if hub is None:
        raise ExportError(f"checkpoint {name} is neither a directory here nor a model's name on the Hugging Face Hub")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(hub["id"], revision=hub["revision"], allow_patterns=patterns))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise ExportError(
            f"checkpoint {name} is not a directory here, and the Hugging Face Hub does not give it: {first_line(error)}"
        ) from error


def read_config(name: str, path: Path) -> dict[str, Any]:
    if not (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file():
            raise ExportError(f"checkpoint {name} is an adapter; name its base model, and the adapter by --lora")
        _refuse_other_format(name, path, {})
        raise ExportError(f"checkpoint {name} has no config.json, expected a checkpoint as transformers writes it")
    fields = read_object(name, path / "config.json")
    _refuse_other_format(name, path, fields)
    if "quantization_config" not in fields and (path / MODEL_OPTIMIZER).is_file():
        settings = read_object(name, path / MODEL_OPTIMIZER).get("quantization")
        if isinstance(settings, dict):
            fields["quantization_config"] = settings | {"quant_method": "modelopt"}
    return fields


def _refuse_other_format(name: str, path: Path, fields: dict[str, Any]) -> None:
    """Name what another program has made of a checkpoint."""
    safe = any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").is_file()
    found = None if safe else next((what for pattern, what in OTHER_FORMATS.items() if any(path.glob(pattern))), None)
    if isinstance(settings := fields.get("quantization"), dict) and "group_size" in settings:
        found = "a model that MLX has quantised"
    if found is not None:
        raise ExportError(
            f"checkpoint {name} is {found}, expected a checkpoint as transformers writes it; name the model that it "
            "was made from"
        )
