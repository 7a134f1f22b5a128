"""Tiny random encoder–decoders of every kind, drafts of them, and what transformers says behind a source."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, GenerationMixin
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from trt_spec.engines import Sound
from trt_spec.runtime.sources.log_mel import one_window, samples_of

from .families import SIZES, VOCAB
from .models import write_tokenizer

START, END, PADDING = 0, 1, 2  # M2M100 gives padding no position, so that no text of a test may hold it
SOUND = Sound(bands=8, frames=60)
RELATIVE = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "d_kv": 20}
OURS = SIZES | {
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_ff"), 64),
    **dict.fromkeys(("max_position_embeddings", "max_target_positions"), 128),
    **dict.fromkeys(("hidden_size", "d_model"), 64),  # in heads of 16, for which TensorRT has fused kernels
    "max_source_positions": SOUND.frames // 2,
    "num_mel_bins": SOUND.bands,
    "decoder_start_token_id": START,
    "pad_token_id": PADDING,
    "scale_embedding": True,
    "initializer_factor": 1.0,
    **RELATIVE,
}


def tiny_with_source(kind: str, path: Path, seed: int = 0, **settings: Any) -> Path:
    """Write two layers of encoder and decoder whose text depends on the source."""
    known = CONFIG_MAPPING[kind]
    fields = set(known().to_dict()) | set(known.attribute_map)
    config = known(**{name: value for name, value in (OURS | settings).items() if name in fields})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _class_of(kind).from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn_like(parameter)
                if parameter.dim() == 1:  # norms and biases, which would hide mistakes
                    parameter.add_(noise * 0.1)
                elif "relative" in name:
                    parameter.copy_(noise)
                elif "embed" not in name and "shared" not in name and "head" not in name:
                    parameter.copy_(noise * 0.3)
    return _write(model, path)


SPECIAL = (
    "endoftext",
    "startoftranscript",
    "en",
    "de",
    "translate",
    "transcribe",
    "startofprev",
    "nospeech",
    "notimestamps",
)
TIMES = SOUND.frames // 2 + 1
WORDS = 40  # tokens before the special ones


def tiny_listener(path: Path, seed: int = 0, *, multilingual: bool = True, **settings: Any) -> Path:
    """Write a Whisper with special tokens and times, whose times are as likely as its words."""
    ids = {name: WORDS + place for place, name in enumerate(SPECIAL)}
    size = WORDS + len(SPECIAL) + TIMES
    end, start = ids["endoftext"], ids["startoftranscript"]
    tiny_with_source("whisper", path, seed, vocab_size=size, eos_token_id=end, bos_token_id=end, **settings)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = {f"{chr(0x4E00 + place)}": place for place in range(WORDS)}
    tokenizer["model"]["merges"], tokenizer["pre_tokenizer"], tokenizer["decoder"] = [], None, {"type": "Fuse"}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer["added_tokens"] = [
        {"id": index, "content": f"<|{name}|>", "special": True} | plain for name, index in ids.items()
    ]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    generation = json.loads((path / "generation_config.json").read_text())
    generation.pop("_from_model_config", None)  # else it is made anew
    generation |= {
        "decoder_start_token_id": start,
        "eos_token_id": end,
        "pad_token_id": end,
        "bad_words_ids": None,
        "is_multilingual": multilingual,
        "lang_to_id": {f"<|{name}|>": ids[name] for name in ("en", "de")},
        "task_to_id": {name: ids[name] for name in ("translate", "transcribe")},
        "no_timestamps_token_id": ids["notimestamps"],
        "prev_sot_token_id": ids["startofprev"],
        "begin_suppress_tokens": [3, end],
        "suppress_tokens": [5, 6, *(ids[name] for name in SPECIAL[1:-1])],
        "max_initial_timestamp_index": 10,
    }
    if not multilingual:
        generation = {name: value for name, value in generation.items() if not name.endswith("_to_id")}
    (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def noisy_copy(kind: str, checkpoint: Path, out: Path, noise: float, *, encoder: bool) -> Path:
    """Write a draft: the same decoder with noise in every weight, and in those of the encoder, if it is to differ."""
    model = _class_of(kind).from_pretrained(checkpoint, dtype=torch.float32)
    shared = set() if encoder else {id(one) for one in model.get_encoder().parameters()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        for parameter in model.parameters():
            if id(parameter) not in shared:
                parameter.add_(torch.randn_like(parameter) * noise * parameter.std(unbiased=False))
    return _write(model, out)


def noisy_listener(checkpoint: Path, out: Path) -> Path:
    """Write a draft of such a Whisper, which shares its encoder."""
    noisy_copy("whisper", checkpoint, out, 0.05, encoder=False)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(checkpoint / name, out)
    return out


def example_sources(kind: str, count: int, seed: int = 0) -> list[Any]:
    """Make sources of many lengths."""
    random = Random(seed)
    if kind == "whisper":
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(random.randint(1, samples_of(SOUND)), generator=generator) for _ in range(count)]
    return [[random.randrange(3, VOCAB) for _ in range(random.randint(1, 40))] for _ in range(count)]


def said_by_transformers(
    kind: str, checkpoint: Path, sources: Sequence[Any], tokens: int, adapter: Path | None = None
) -> list[list[int]]:
    """Return the greedy texts of so many tokens; none of them ends before."""
    asked = {"max_new_tokens": tokens, "min_new_tokens": tokens, "num_beams": 1, "do_sample": False}
    write = writer(kind, checkpoint, adapter, **asked)
    return [write(source)[0, 1:].tolist() for source in sources]


def writer(kind: str, checkpoint: Path, adapter: Path | None = None, **settings: Any) -> Callable[[Any], Any]:
    """Return what gives transformers' output behind a source."""
    model = _class_of(kind).from_pretrained(checkpoint, dtype=torch.float32).eval()
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()

    def write(source: Any) -> Any:
        return GenerationMixin.generate(  # Whisper's own adds rules for tokens that these models do not have
            model,
            **_given(kind, source),
            decoder_input_ids=torch.tensor([[START]]),
            decoder_start_token_id=START,
            bad_words_ids=[[PADDING]],
            **settings,
        )

    return write


def _given(kind: str, source: Any) -> dict[str, Tensor]:
    if kind == "whisper":
        return {"input_features": one_window(source, SOUND)[None]}
    ids = torch.tensor([source])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _class_of(kind: str) -> Any:
    return AutoModelForSpeechSeq2Seq if kind == "whisper" else AutoModelForSeq2SeqLM


def _write(model: Any, path: Path) -> Path:
    settings = model.generation_config
    settings.decoder_start_token_id, settings.eos_token_id, settings.pad_token_id = START, END, PADDING
    settings.forced_bos_token_id = settings.forced_eos_token_id = None
    settings.bad_words_ids = [[PADDING]]
    settings.max_length = settings.min_length = None  # the calls say these
    model.save_pretrained(path)
    write_tokenizer(path, VOCAB)
    return path
