"""Merge a LoRA adapter, as PEFT writes one, into the weights of its base model."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import safe_open

from ...engines import ExportError
from ...engines.errors import first_line
from ..families.text_models import OTHERS
from .reading import read_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
OF_PEFT = "base_model.model."  # that all names of its tensors begin with
TEXT = re.compile(r"\b(language_model|text_model)\.")  # what the text model is called in a whole


def require_adapter(folder: Path) -> None:
    """Refuse what is no LoRA adapter, before any weight is read."""
    if not folder.exists():
        raise ExportError(f"adapter {folder} does not exist, expected the folder of one as PEFT writes it")
    if not (folder / CONFIG).is_file():
        raise ExportError(f"{folder} has no {CONFIG}, expected a LoRA adapter as PEFT writes it")
    kind = read_object(str(folder), folder / CONFIG).get("peft_type")
    if kind != "LORA":
        raise ExportError(f"{folder} is an adapter of the type {kind}, expected LORA; merge it with PEFT first")
    if not (folder / WEIGHTS).is_file():
        raise ExportError(f"adapter {folder} has no {WEIGHTS}, expected its weights as safetensors")
    if find_spec("peft") is None:
        raise ExportError(f"adapter {folder} needs peft to be merged; pip install 'trt-spec[export]'")


def names_whole(folder: Path) -> bool:
    """Whether an adapter names its matrices as those of a model that reads more than text."""
    return any(TEXT.search(name) or OTHERS.search(name.removeprefix(OF_PEFT)) for name in _tensors(folder))


def _tensors(folder: Path) -> list[str]:
    with safe_open(folder / WEIGHTS, "pt") as file:
        return list(file.keys())


def merged(model: Any, folder: Path) -> Any:
    """Return the model with the adapter in its weights; they stay in their own type."""
    from peft import PeftModel, load_peft_weights, set_peft_model_state_dict

    try:
        adapted = PeftModel.from_pretrained(
            model, str(folder), local_files_only=True
        )  # which keeps what it lacks quiet
        weights = load_peft_weights(str(folder), device="cpu", local_files_only=True)
        placed: Any = set_peft_model_state_dict(adapted, weights)
        if unknown := sorted(placed.unexpected_keys):
            raise ExportError(
                f"adapter {folder} does not fit its base model, which lacks what {len(unknown)} of its tensors change, "
                f"the first is {unknown[0]}; name the base model by which it was trained"
            )
        return adapted.merge_and_unload(safe_merge=True)
    except ExportError:
        raise
    except Exception as error:  # peft, torch and safetensors each have their own
        raise ExportError(f"adapter {folder} does not fit its base model: {first_line(error)}") from error
