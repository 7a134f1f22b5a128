"""Find a checkpoint, refuse it before any weight is read if it cannot be exported, and load its weights."""

import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ...engines import ExportError, Masks
from ...engines.errors import first_line, one_line
from ..families.shape import ModelShape, refuse_unsupported, shape_of
from ..families.table import REFUSED, WITH_SOURCES
from ..families.text_models import OTHERS, READS_MORE, UNSCALED, WEIGHT_NAMES, text_config_of
from ..quantised import Dequantised, Kept, how_quantised, rounds_activations
from ..sources.with_source import WithSource
from ..special import mend
from .finding import GGUF, SMALL_FILES, download, gguf_file, read_config
from .gguf_files import UNQUANTISED, forget, main_type, parsed_once
from .lora import merged, names_whole, require_adapter
from .reading import read_object
from .unknown_tokens import add_unknown_tokens
from .weight_files import require_weights, weight_files
from .whole import load_whole, take_text

OF_CACHES = (".k_scale", ".v_scale")  # what others read who keep keys and values in eight bits
NOT_EAGER = ("falcon",)  # whose eager attention adds the biases of ALiBi twice


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that can be exported, its weights still unread."""

    name: str  # as the user gave it
    path: Path
    config: Any
    shape: ModelShape
    files: tuple[Path, ...]  # that hold its weights
    gguf: str | None = None  # the file in `path` that holds all of it, if it is one
    lora: Path | None = None  # an adapter that is merged into the weights
    quantised: dict[str, Any] | None = None  # the settings by which it was quantised, with `words` for a user
    reads_more: str | None = None  # the type of the whole, if `config` is that of its text model alone

    @property
    def label(self) -> str:
        """The bundle's name for it: its id, or its file's or directory's own name, which means something elsewhere."""
        place = Path(self.name).resolve()
        own = place.name.removesuffix(GGUF) if place.exists() else self.name.partition("@")[0]
        return own if self.lora is None else f"{own}+{self.lora.resolve().name}"

    @property
    def stored_as(self) -> str:
        """How its weights are quantised, for a user; empty if they are not."""
        if self.gguf is None:
            return "" if self.quantised is None else str(self.quantised["words"])
        kind = main_type(self.path / self.gguf)
        return "" if kind in UNQUANTISED else f"GGUF, {kind}"

    @property
    def weight_bytes(self) -> int:
        """The size of the files that hold its weights."""
        return sum(file.stat().st_size for file in self.files)

    def masks(self, vocab_size: int) -> Masks | None:
        """What a draft reads in place of tokens that are not known yet, if it was trained to (PARD)."""
        token = getattr(self.config, "pard_token", None)
        if token is None:
            return None
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ExportError(
                f"config.json of checkpoint {self.name} has the pard_token {token!r}, expected one of its "
                f"{vocab_size:,} tokens; download it again"
            )
        return Masks(token)

    @property
    def notes(self) -> list[str]:
        """Notes for its user on what is exported."""
        notes = []
        if self.reads_more is not None:
            more = f"reads more than text ({self.reads_more})"
            notes.append(f"{self.name} {more}: its text model ({self.architecture}) is exported")
        if self.reads_more in UNSCALED:
            notes.append(
                f"{self.name} has logits times {self.config.logit_scale:g}, as its text model says; transformers "
                "leaves that out where it runs the whole, so that sampled texts differ there, and greedy ones do not"
            )
        if self.quantised is not None and rounds_activations(self.quantised):
            notes.append(
                f"{self.name} is meant for activations of eight bits or fewer, which are not rounded here, so that "
                "texts may differ from those of vLLM and others that round them"
            )
        if self.shape.ends:
            notes.append(f"{self.name} has {self.shape.positions:,} positions here: {self.shape.ends}")
        return notes

    @property
    def architecture(self) -> str:
        return str(self.config.model_type)


def find_config(name: str) -> tuple[Path, dict[str, Any]] | None:
    """Find a checkpoint and read its config.json, nothing else; None if it has none of its own.

    One of a type that cannot be exported is refused here, before anybody asks for its weights.
    """
    if gguf_file(name) is not None:
        return None
    path = Path(name) if Path(name).is_dir() else download(name, SMALL_FILES)
    if not (path / "config.json").is_file():
        return None
    fields = read_object(name, path / "config.json")
    if str(fields.get("model_type")) in REFUSED:
        refuse_unsupported(name, fields)
    return path, fields


def open_checkpoint(name: str | Path, lora: str | Path | None = None) -> Checkpoint:
    """Find a directory, a file or a model of the Hugging Face Hub and read all of it but the weights.

    The adapter in the folder `lora` is merged into them when they are loaded.
    """
    found = _open_checkpoint(str(name))
    if lora is None:
        return found
    require_adapter(Path(lora))
    return replace(found, lora=Path(lora))


def _open_checkpoint(name: str) -> Checkpoint:
    if (file := gguf_file(name)) is not None:
        return _open_gguf(name, file)
    path = Path(name) if Path(name).is_dir() else download(name, SMALL_FILES)
    fields = read_config(name, path)
    refuse_unsupported(name, fields)
    _refuse_dtype(name, fields)
    quantised = how_quantised(name, fields)
    config = _typed_config(name, path)
    if quantised is not None and config.model_type in WITH_SOURCES:
        raise ExportError(
            f"checkpoint {name} is a quantised encoder-decoder, expected one as it was trained; --weights quantises it"
        )
    reads_more = None
    if config.model_type in READS_MORE:
        reads_more, config = config.model_type, text_config_of(config)
    if "quantization_config" in fields:
        config.__dict__.pop("quantization_config", None)  # transformers shall build the ordinary model
    shape = shape_of(name, config)
    require_weights(name, path)
    files = tuple(weight_files(name, path))
    return Checkpoint(name, path, config, shape, files, quantised=quantised, reads_more=reads_more)


def _refuse_dtype(name: str, fields: dict[str, Any]) -> None:
    for place in (fields, fields.get("text_config")):
        for key in ("dtype", "torch_dtype"):
            dtype = place.get(key) if isinstance(place, dict) else None
            if dtype in (None, "auto") or isinstance(
                getattr(torch, str(dtype).removeprefix("torch."), None), torch.dtype
            ):
                continue
            raise ExportError(
                f"config.json of checkpoint {name} has the {key} {dtype!r}, which is no type of numbers, expected for "
                "instance bfloat16; correct it"
            )


def load_model(checkpoint: Checkpoint, dtype: str, vocab_size: int = 0) -> Any:
    """Load the model as transformers builds it, its weights in `dtype`, with transformers' own attention.

    One that has fewer than `vocab_size` tokens reads the others as nothing, and never proposes them.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoModelForCausalLM,
        AutoModelForSeq2SeqLM,
        AutoModelForSpeechSeq2Seq,
    )

    stored: dict[str, Any] = {"gguf_file": checkpoint.gguf} if checkpoint.gguf else {"use_safetensors": True}
    family: Any = AutoModelForCausalLM
    if (source := checkpoint.shape.source) is not None:
        family = AutoModelForSpeechSeq2Seq if source.sound else AutoModelForSeq2SeqLM
    place: Path | None = checkpoint.path
    made: Dequantised | None = None
    if checkpoint.quantised is not None:
        made = Dequantised(checkpoint.name, checkpoint.files, checkpoint.quantised)
        family, place, stored = MODEL_FOR_CAUSAL_LM_MAPPING[type(checkpoint.config)], None, {"state_dict": made}
    if checkpoint.reads_more:
        stored["key_mapping"] = WEIGHT_NAMES
    try:
        with reading(checkpoint.gguf):
            model, report = family.from_pretrained(
                place,
                config=checkpoint.config,
                dtype=getattr(torch, dtype),
                attn_implementation="sdpa" if checkpoint.architecture in NOT_EAGER else "eager",
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                **stored,
            )
    except Exception as error:  # safetensors, transformers and torch each have their own
        if made is not None and made.failure is not None:
            raise made.failure from error
        raise ExportError(f"the weights of checkpoint {checkpoint.name} cannot be read: {first_line(error)}") from error
    if checkpoint.gguf:
        forget()
        model.hf_quantizer = None  # it is dequantised: an ordinary model, which can be saved as one
        model.config.__dict__.pop("quantization_config", None)
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ExportError(
            f"checkpoint {checkpoint.name} lacks {len(missing)} tensors, the first is {missing[0]}; download it again"
        )
    added = re.compile(rf"model\.layers\.{checkpoint.shape.layers}\.|mtp\.")  # a layer of MTP, which is a head
    extra = sorted(
        key
        for key in report["unexpected_keys"]
        if not key.endswith(OF_CACHES)
        and not (checkpoint.reads_more and OTHERS.search(key))
        and not (getattr(checkpoint.config, "num_mtp_layers", 0) and added.match(key))
    )
    if any(key.startswith("v_head.") for key in extra):
        raise ExportError(
            f"checkpoint {checkpoint.name} has a value head (v_head), as TRL trains it beside the model; save the "
            "model alone, by model.pretrained_model.save_pretrained"
        )
    if extra:
        raise ExportError(
            f"checkpoint {checkpoint.name} holds {len(extra)} tensors that a {checkpoint.architecture} of its "
            f"config.json does not have, the first is {extra[0]}; take the config.json that belongs to the weights"
        )
    for name, weight in model.named_parameters():
        if not torch.stack(torch.aminmax(weight.detach())).isfinite().all():  # a NaN is both
            raise ExportError(
                f"tensor {name} of checkpoint {checkpoint.name} holds numbers that are not finite; take a sound one"
            )
    mend(model)
    if checkpoint.lora is not None:
        if checkpoint.reads_more and names_whole(checkpoint.lora):
            take_text(model, load_whole(checkpoint, dtype))
        else:
            model = merged(model, checkpoint.lora)
    if source is not None:
        model = WithSource(model)
    if vocab_size > checkpoint.shape.vocab_size:
        add_unknown_tokens(model, vocab_size)
    return model.eval()


def reading(gguf: str | None) -> AbstractContextManager[None]:
    """Give what transformers shall read a checkpoint in, whose GGUF file is named if it is one."""
    return nullcontext() if gguf is None else parsed_once()


def kept_matrices(checkpoint: Checkpoint) -> Kept | None:
    """Return what a graph can take from a quantised checkpoint as it is."""
    if checkpoint.quantised is None or checkpoint.lora is not None:
        return None
    return Kept(Dequantised(checkpoint.name, checkpoint.files, checkpoint.quantised))


def _open_gguf(name: str, file: Path) -> Checkpoint:
    if lacking := [library for library in ("gguf", "accelerate") if find_spec(library) is None]:
        raise ExportError(f"{file.name} needs {' and '.join(lacking)} to be read; pip install 'trt-spec[export]'")
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise ExportError(f"{file.name} is no GGUF file, whatever its name says; download it again")
    config = _typed_config(name, file.parent, file.name)
    refuse_unsupported(name, {"model_type": config.model_type, "architectures": ["ForCausalLM"]})
    return Checkpoint(name, file.parent, config, shape_of(name, config), (file,), file.name)


def _typed_config(name: str, path: Path, gguf: str | None = None) -> Any:
    from transformers import AutoConfig

    stored = {} if gguf is None else {"gguf_file": gguf}
    try:
        with reading(gguf):
            return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False, **stored)
    except Exception as error:  # each configuration class raises its own
        what = gguf or "config.json"
        raise ExportError(f"{what} of checkpoint {name} is refused by transformers: {one_line(error)}") from error
