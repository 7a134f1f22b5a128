"""Load a checkpoint with all that it reads beside text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from ...engines import ExportError
from ...engines.errors import first_line
from ..quantised import Dequantised
from .lora import merged


class Whole(Protocol):
    """The files of a checkpoint, and what was done to its weights."""

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> Path: ...

    @property
    def files(self) -> Sequence[Path]: ...

    @property
    def lora(self) -> Path | None: ...

    @property
    def quantised(self) -> dict[str, Any] | None: ...


def whole_config(checkpoint: Whole) -> Any:
    """Return the configuration of a checkpoint with all that it reads, as that of an unquantised one."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(checkpoint.path, local_files_only=True, trust_remote_code=False)
    for one in (config, config.get_text_config()):
        one.__dict__.pop("quantization_config", None)
    return config


def load_whole(checkpoint: Whole, dtype: str) -> Any:
    """Load the whole of a checkpoint that reads images, its weights in `dtype`, with transformers' own attention.

    Weights are dequantised, and its adapter is merged into them.
    """
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText

    config, family = whole_config(checkpoint), AutoModelForImageTextToText
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise ExportError(
            f"checkpoint {checkpoint.name} is a {config.model_type}, the whole of which is not read here; merge its "
            "adapter with PEFT first"
        )
    place: Any = checkpoint.path
    made: Dequantised | None = None
    stored: dict[str, Any] = {"use_safetensors": True}
    if checkpoint.quantised is not None:
        made = Dequantised(checkpoint.name, checkpoint.files, checkpoint.quantised)
        family, place, stored = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)], None, {"state_dict": made}
    try:
        model, report = family.from_pretrained(
            place,
            config=config,
            dtype=getattr(torch, dtype),
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **stored,
        )
    except Exception as error:  # safetensors, transformers and torch each have their own
        if made is not None and made.failure is not None:
            raise made.failure from error
        raise ExportError(f"the weights of checkpoint {checkpoint.name} cannot be read: {first_line(error)}") from error
    if missing := sorted(report["missing_keys"]):
        raise ExportError(
            f"checkpoint {checkpoint.name} lacks {len(missing)} tensors, the first is {missing[0]}; download it again"
        )
    if checkpoint.lora is not None:
        model = merged(model, checkpoint.lora)
    return model.eval()


def take_text(model: Any, whole: Any) -> None:
    """Give a text model the weights that it has in the whole."""
    try:
        model.get_decoder().load_state_dict(whole.model.get_decoder().state_dict())
        model.get_output_embeddings().load_state_dict(whole.get_output_embeddings().state_dict())
    except (RuntimeError, AttributeError) as error:
        raise ExportError(
            f"the text model of a {whole.config.model_type} has other names in the whole ({first_line(error)}); merge "
            "its adapter with PEFT first"
        ) from error
