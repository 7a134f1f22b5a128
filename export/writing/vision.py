"""Export the graph that sees for a target, and check both on an image."""

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...engines import Contract, ExportError, VisionEntry
from ...engines.bundle import FUSED, GRAPH, TARGET, VISION, WEIGHTS
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.lora import names_whole
from ..checkpoints.whole import load_whole, whole_config
from ..passes.quantise import Quantisation
from ..seeing.check_vision import check_seeing, check_vision, seen_by
from ..seeing.families import FAMILIES, family_of, seeing_contract, vision_contract
from .graph import build_graph, write_graph
from .report import VisionReport


def config_of_whole(checkpoint: Checkpoint) -> Any:
    """Return the configuration of a checkpoint that sees; refuse one that does not, or not in a known way."""
    if checkpoint.reads_more not in FAMILIES:
        kind = checkpoint.reads_more or checkpoint.architecture
        raise ExportError(
            f"checkpoint {checkpoint.name} has the model type {kind!r}, whose images cannot be exported; those of "
            f"{', '.join(FAMILIES)} can: leave out --images"
        )
    if checkpoint.lora is not None and not names_whole(checkpoint.lora):
        raise ExportError(
            f"adapter {checkpoint.lora} names matrices of a model of text alone, but {checkpoint.name} is to see; give "
            "one of the whole, or leave out --images"
        )
    config = whole_config(checkpoint)
    known = family_of(config).eyes
    if known and config.vision_config.model_type not in known:
        raise ExportError(
            f"checkpoint {checkpoint.name} sees by a vision tower of the type {config.vision_config.model_type!r}, "
            f"expected {' or '.join(known)}; leave out --images"
        )
    return config


def contract_with_images(checkpoint: Checkpoint, contract: Contract) -> Contract:
    """Return the contract of a target that reads entries of images, too."""
    config = config_of_whole(checkpoint)
    if contract.recurrent:
        raise ExportError(
            f"checkpoint {checkpoint.name} keeps recurrent states, with which images cannot be exported yet; leave out "
            "--images"
        )
    return seeing_contract(config, contract)


def export_vision(
    checkpoint: Checkpoint,
    contract: Contract,
    folder: Path,
    weights: Quantisation,
    text_weights: Quantisation,
    check: bool,
    progress: Callable[[str], None],
) -> VisionReport:
    """Write the vision graph of a target; check it, and the target's own graphs if their weights are not rounded."""
    begun = time.perf_counter()
    progress(f"{VISION}: loading the weights of {checkpoint.name}")
    whole = load_whole(checkpoint, contract.dtype)
    tower = family_of(whole.config).tower(whole)
    made = vision_contract(whole.config, contract)
    text_size = sum(parameter.numel() for parameter in whole.model.get_decoder().parameters())
    progress(f"{VISION}: tracing")
    graph, _ = build_graph(tower, made, 0, weights)
    said = whole.get_output_embeddings().weight.numel() if not whole.config.tie_word_embeddings else 0
    parameters = sum(parameter.numel() for parameter in whole.parameters()) - text_size - said
    progress(f"{VISION}: writing")
    write_graph(graph, folder / VISION)
    nodes = len(graph.graph)
    seen = seen_by(whole.float(), contract.vocab_size) if check else None  # with weights as they were rounded
    del whole, tower, graph  # the check holds the written weights: the checkpoint's must be gone
    gc.collect()
    found: dict[str, Any] = {}
    if seen is not None:
        progress(f"{VISION}: checking in ONNX Runtime")
        found = check_vision(folder / VISION / GRAPH, made, seen, weights.kind != "none")
        for name in (GRAPH, FUSED) if text_weights.kind == "none" else ():
            if (folder / TARGET / name).exists():
                found[f"{TARGET}/{name}"] = check_seeing(folder / TARGET / name, contract, seen)
    entry = VisionEntry(checkpoint.label, parameters, made, weights.kind, found)
    size = (folder / VISION / WEIGHTS).stat().st_size
    return VisionReport(entry, nodes, size, time.perf_counter() - begun)
