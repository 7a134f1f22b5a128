"""Merge a LoRA adapter, as PEFT writes one, into the weights of its base model."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...engines import ExportError
from ...engines.errors import first_line
from .reading import read_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def require_adapter(folder: Path) -> None:
    """Refuse what is no LoRA adapter, before any weight is read."""
    if not (folder / CONFIG).is_file():
        raise ExportError(f"{folder} has no {CONFIG}, expected a LoRA adapter as PEFT writes it")
    kind = read_object(str(folder), folder / CONFIG).get("peft_type")
    if kind != "LORA":
        raise ExportError(f"{folder} is an adapter of the type {kind}, expected LORA; merge it with PEFT first")
    if not (folder / WEIGHTS).is_file():
        raise ExportError(f"adapter {folder} has no {WEIGHTS}, expected its weights as safetensors")
    if find_spec("peft") is None:
        raise ExportError(f"adapter {folder} needs peft to be merged; pip install 'trt-spec[export]'")


def merged(model: Any, folder: Path) -> Any:
    """Return the model with the adapter in its weights; they stay in their own type."""
    from peft import PeftModel

    try:
        return PeftModel.from_pretrained(model, str(folder), local_files_only=True).merge_and_unload(safe_merge=True)
    except Exception as error:  # peft, torch and safetensors each have their own
        raise ExportError(f"adapter {folder} does not fit its base model: {first_line(error)}") from error
