"""Show what is in a bundle: its models, what their graphs take and give, their sizes, and the memory to run them."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...engines import (
    MAX_DRAFT_LENGTH,
    Bundle,
    BundleError,
    Contract,
    EncoderEntry,
    ModelEntry,
    RequestError,
    VisionEntry,
)
from ...engines.bundle import VISION
from ..console import in_bytes, table
from ..flags.sampling import add_number, batch_size, positive
from ..measuring.gpus import GPUS, gpu_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="the folder that export-models wrote")
    add_number(parser, "--batch", 1, "requests to decode together", batch_size)
    parser.add_argument(
        "--length", type=positive, metavar="L", help="tokens of each request (default: as many as the bundle allows)"
    )
    parser.add_argument(
        "--gpu",
        nargs="?",
        const=next(iter(GPUS)),
        metavar="|".join((*GPUS, "GB/s")),
        help="predict what the engine torch does on this GPU, or on one that reads so many gigabytes a second; none is "
        f"needed (default {next(iter(GPUS))})",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    bundle = Bundle.open(arguments.bundle)
    length = arguments.length or bundle.max_length
    if length > bundle.max_length:
        raise RequestError(f"--length is {length}, expected at most the {bundle.max_length} tokens the bundle allows")
    gpu = None if arguments.gpu is None else gpu_of(arguments.gpu)
    found = describe(bundle, arguments.batch, length)
    if gpu is not None:
        from ...runtime.memory.bucket import SHORTEST
        from ...runtime.state.asked import DEFAULT_DRAFT_LENGTH
        from ..measuring.gpu_prediction import predict

        read = arguments.length or min(SHORTEST, bundle.max_length)
        found["prediction"] = predict(bundle, gpu, arguments.batch, DEFAULT_DRAFT_LENGTH, read)
    print(json.dumps(found) if arguments.json else _report(found))
    return 0


def describe(bundle: Bundle, batch: int, length: int) -> dict[str, Any]:
    models = bundle.models
    tokenizer = bundle.tokenizer
    weight_bytes = sum(map(bundle.weight_bytes, bundle.folders))
    source_bytes = batch * sum(bundle.longest_source(name) * one.contract.source_bytes for name, one in models.items())
    cache_bytes = sum(_cache_bytes(model.contract, batch, length) for model in models.values())
    return {
        "path": str(bundle.path),
        "made_by": bundle.made_by,
        "bytes": sum(entry["bytes"] for entry in bundle.files.values()),
        "files": len(bundle.files),
        "max_length": bundle.max_length,
        "tokenizer": {
            "vocab_size": tokenizer.vocab_size,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_ids": list(tokenizer.eos_token_ids),
            "chat_template": tokenizer.chat_template is not None,
        },
        "encoders": {name: _encoder_json(bundle, name, one) for name, one in bundle.encoders.items()},
        "vision": bundle.vision and _vision_json(bundle, bundle.vision),
        "models": {role: _model_json(bundle, role, model, length) for role, model in models.items()},
        "memory": {
            "batch": batch,
            "length": length,
            "weight_bytes": weight_bytes,
            "cache_bytes": cache_bytes,
            "source_bytes": source_bytes,
            "total_bytes": weight_bytes + cache_bytes + source_bytes,
        },
    }


def _model_json(bundle: Bundle, role: str, model: ModelEntry, length: int) -> dict[str, Any]:
    contract = model.contract
    return {
        "name": model.name,
        "architecture": model.architecture,
        "parameters": model.parameters,
        "quantised": model.weights,
        "dequantised": model.dequantised,
        "dtype": contract.dtype,
        "layers": contract.layers,
        "heads": contract.heads,
        "states": list(map(str, contract.states)),
        "vocab_size": contract.vocab_size,
        "look_aheads": model.look_aheads,
        "max_length": contract.max_length,
        "graph_bytes": bundle.files[f"{role}/model.onnx"]["bytes"],
        "weight_bytes": bundle.weight_bytes(role),
        "shards": contract.shards,
        "kv_bytes_per_token": contract.cache_bytes_per_token,
        "kv_bytes_per_row": contract.cache_bytes(1, length),
        "adapters": contract.adapters and {"most": contract.adapters.most, "rank": contract.adapters.rank},
        "inputs": [str(spec) for spec in contract.without_adapters.inputs],
        "outputs": [str(spec) for spec in contract.outputs],
        "aliases": contract.aliases,
        "check": model.check,
    }


def _encoder_json(bundle: Bundle, name: str, encoder: EncoderEntry) -> dict[str, Any]:
    contract = encoder.contract
    return {
        "name": encoder.name,
        "feeds": list(contract.feeds),
        "parameters": encoder.parameters,
        "quantised": encoder.weights,
        "dtype": contract.dtype,
        "longest": contract.longest,
        "sound": contract.sound and asdict(contract.sound),
        "weight_bytes": bundle.weight_bytes(name),
        "inputs": [str(spec) for spec in contract.inputs],
        "outputs": [str(spec) for spec in contract.outputs],
        "check": encoder.check,
    }


def _vision_json(bundle: Bundle, vision: VisionEntry) -> dict[str, Any]:
    contract = vision.contract
    return {
        "name": vision.name,
        "parameters": vision.parameters,
        "quantised": vision.weights,
        "dtype": contract.dtype,
        "weight_bytes": bundle.weight_bytes(VISION),
        "inputs": [str(spec) for spec in contract.inputs],
        "outputs": [str(spec) for spec in contract.outputs],
        "check": vision.check,
    }


def _cache_bytes(contract: Contract, batch: int, length: int) -> int:
    """Return the bytes that the runtime's cache would take, by growing one that has no memory."""
    from ...runtime.memory.row_cache import RowCache

    cache = RowCache(contract, "meta", batch)
    cache.fit(batch, length + MAX_DRAFT_LENGTH)
    return sum(buffer.nbytes for buffer in cache.buffers.values())


def _report(found: dict[str, Any]) -> str:
    tokenizer, memory = found["tokenizer"], found["memory"]
    made_by = ", ".join(f"{name} {version}" for name, version in found["made_by"].items()) or "unknown"
    models = found["models"].values()
    rows = [("", *found["models"])]
    for title, text in (
        ("name", lambda m: m["name"]),
        ("architecture", lambda m: m["architecture"]),
        ("parameters", lambda m: f"{m['parameters']:,}"),
        ("dtype", lambda m: m["dtype"]),
        ("layers that keep keys", lambda m: str(m["layers"])),
        ("heads", lambda m: str(m["heads"])),
        ("vocabulary", lambda m: f"{m['vocab_size']:,}"),
        *([("look-aheads", lambda m: str(m["look_aheads"]))] if any(m["look_aheads"] for m in models) else []),
        ("longest sequence", lambda m: f"{m['max_length']:,}"),
        ("graph", lambda m: in_bytes(m["graph_bytes"])),
        ("quantised", lambda m: m["quantised"]),
        ("weights", lambda m: in_bytes(m["weight_bytes"]) + _in_shards(m["shards"])),
        ("cache of a token", lambda m: in_bytes(m["kv_bytes_per_token"])),
        (f"cache of {memory['length']:,} tokens", lambda m: in_bytes(m["kv_bytes_per_row"])),
        ("checked", lambda m: _checked(m["check"])),
    ):
        rows.append((title, *map(text, models)))
    contract = found["models"]["target"]
    sources = f" + {in_bytes(memory['source_bytes'])} of sources" if found["encoders"] else ""
    return "\n".join(
        [
            f"{found['path']}: {found['files']} files, {in_bytes(found['bytes'])}, all as their manifest says",
            f"made by {made_by}",
            f"tokenizer: {tokenizer['vocab_size']:,} tokens, ends with {_ids(tokenizer['eos_token_ids'])}, "
            f"{'a' if tokenizer['chat_template'] else 'no'} chat template",
            "",
            table(rows, left=len(rows[0])),
            "",
            "contract of the target",
            *(f"  in   {line}" for line in _folded(contract["inputs"])),
            *(f"  out  {line}" for line in _folded(contract["outputs"])),
            "  every present_* becomes its past_*, those with a capacity in its memory",
            *(f"\n{name}: {_encoder_line(one)}" for name, one in found["encoders"].items()),
            *([f"\nvision: {_vision_line(found['vision'])}"] if found["vision"] else []),
            "",
            f"memory for {memory['batch']} × {memory['length']:,} tokens: {in_bytes(memory['weight_bytes'])} weights + "
            f"{in_bytes(memory['cache_bytes'])} cache{sources} = {in_bytes(memory['total_bytes'])}, plus what the "
            "engine needs",
            *(["", _prediction(found["prediction"])] if "prediction" in found else []),
        ]
    )


def _prediction(found: dict[str, Any]) -> str:
    from ..measuring.gpu_prediction import prediction_report

    return prediction_report(found)


def _encoder_line(encoder: dict[str, Any]) -> str:
    reads = "sound" if encoder["sound"] else f"up to {encoder['longest']:,} tokens"
    return (
        f"of {encoder['name']}, reads {reads} for {' and '.join(encoder['feeds'])}; {encoder['parameters']:,} "
        f"parameters, {in_bytes(encoder['weight_bytes'])}, {_checked(encoder['check'])}"
    )


def _in_shards(shards: int) -> str:
    return "" if shards == 1 else f" in each of {shards} shards"


def _vision_line(vision: dict[str, Any]) -> str:
    return (
        f"of {vision['name']}, reads images for the target; {vision['parameters']:,} parameters, "
        f"{in_bytes(vision['weight_bytes'])}, {_checked(vision['check'])}"
    )


def _checked(check: dict[str, Any]) -> str:
    if not check:
        return "no"
    try:
        return f"worst error {check['worst_error']:.1e} of {check['tolerance']:.1e} allowed"
    except (KeyError, TypeError, ValueError) as error:
        raise BundleError(f"the manifest's record of the check is {check}; export the bundle again") from error


def _ids(ids: list[int]) -> str:
    return " or ".join(map(str, ids)) or "no token"


def _folded(specs: list[str]) -> list[str]:
    """The states are so many that the first and the last of each shape stand for all."""
    lines: list[str] = []
    cached: dict[str, list[str]] = {}  # by shape and dtype
    for spec in specs:
        if spec.startswith(("past_", "present_")):
            cached.setdefault(spec.split(" ", 1)[1], []).append(spec)
        else:
            lines.append(spec)
    for alike in cached.values():
        first, last = alike[0].split(" ")[0], alike[-1]
        lines.append(f"{first} … {last} ({len(alike)})" if len(alike) > 1 else last)
    return lines
