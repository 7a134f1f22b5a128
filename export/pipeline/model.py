"""Export a target or a draft: load it, trace it, write its graphs, and compare them with the checkpoint."""

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ...engines import FP8, Contract, ExportError, ModelEntry
from ...engines.bundle import DRAFT, FOREIGN, FUSED, GRAPH, TARGET
from ..checking.check import check_model
from ..checking.key_factors import key_factors
from ..checking.oracle import Reference
from ..checking.quality import Sample
from ..checkpoints.checkpoint import Checkpoint, kept_matrices, load_model
from ..checkpoints.narrow_caches import with_cache
from ..kinds import Joined, Joining
from ..passes.divide_keys import NO_FACTORS
from ..passes.quantise import Quantisation, nothing_known
from ..sources.examples import example_sources
from ..writing.graph import build_graph, write_fused, write_graph
from ..writing.seeing_drafts import SeeingTarget, embedding_size
from ..writing.vision import contract_with_images
from .export import Export
from .room import Room

UNFUSED = ("int8", "nvfp4")  # the one needs heads stacked, for the other ONNX Runtime has no kernels


def export_model(export: Export, role: str) -> None:
    """Export a model; a target has heads and look-aheads joined to it."""
    begun, checkpoint = time.perf_counter(), export.agreed.checkpoints[role]
    weights = export.settings.settled(role, checkpoint)
    contract = _contract(export, role, checkpoint)
    export.progress(f"{role}: loading the weights of {checkpoint.name}")
    kept = kept_matrices(checkpoint)
    model = load_model(checkpoint, contract.dtype, contract.vocab_size)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    joined = _join(export, role, checkpoint, model, contract)
    contract, text = joined.contract, export.running_of(role)
    factors = key_factors(model, contract, text.tokens) if text is not None and contract.rounded_to else NO_FACTORS
    reference = None
    if text is not None and export.settings.check:
        reference = _reference(export, role, checkpoint, model, joined, export.checked(text), factors)
    if reference is not None and weights.kind == "none":  # now, while the graph takes no memory yet
        reference.answer(model)
    export.progress(f"{role}: tracing")
    positions, known = checkpoint.shape.positions, kept or nothing_known
    graph, fired = build_graph(model, contract, positions, weights, known, joined.features, factors)
    if reference is not None and weights.kind != "none":
        export.progress(f"{role}: computing reference logits of the rounded weights")
        reference.answer(model)
    room = None
    if role == TARGET and export.settings.adapters:
        room = Room(export, model, graph, reference)
        contract = replace(contract, adapters=room.adapters)
    export.progress(f"{role}: writing")
    write_graph(graph, export.folder / role)
    nodes = len(graph.graph)
    del model, graph  # the check holds the written weights: the checkpoint's must be gone
    gc.collect()
    check, fused = _check(export, role, contract, weights, reference)
    fired |= fused
    if room is not None:
        fired["adapt"] = room.write(contract, check)
    was = checkpoint.stored_as
    if was:
        how = f"{fired['quantise']} matrices kept bit for bit" if weights.as_stored else kept or "dequantised"
        was += f": {how}"
        export.notes.append(f"{checkpoint.name} is quantised by {was}")
    entry = ModelEntry(
        _kind(role),
        checkpoint.label,
        checkpoint.architecture,
        parameters,
        contract,
        weights.kind,
        check,
        was,
        checkpoint.masks(contract.vocab_size) if _kind(role) == DRAFT else None,
        look_aheads=joined.look_aheads,
    )
    export.report(role, entry, nodes, fired, begun, checkpoint.weight_bytes)


def _kind(role: str) -> str:
    return role if role in (TARGET, FOREIGN) else DRAFT


def _contract(export: Export, role: str, checkpoint: Checkpoint) -> Contract:
    settings = export.settings
    contract = with_cache(checkpoint.name, export.agreed.contract(role, settings.dtype), settings.cache)
    return contract_with_images(checkpoint, contract) if settings.images and role == TARGET else contract


def _join(export: Export, role: str, checkpoint: Checkpoint, model: Any, contract: Contract) -> Joined:
    """Join to a target its heads and look-aheads, and let a draft see as its target does."""
    if contract.image_size:
        export.seeing = SeeingTarget(checkpoint, contract, embedding_size(model))
    elif export.seeing is not None and _kind(role) == DRAFT:
        contract = export.seeing.draft(checkpoint, contract, embedding_size(model))
    joining = export.joining if role == TARGET else Joining()
    joined = joining.join_to(model, contract, export.running, export.progress)
    if joined.look_aheads and contract.image_size:
        raise ExportError("look-aheads and images take the same ids after the vocabulary; leave one of them out")
    export.heads |= joined.heads
    export.notes += joined.notes
    return joined


def _reference(
    export: Export,
    role: str,
    checkpoint: Checkpoint,
    model: Any,
    joined: Joined,
    sample: Sample,
    factors: Mapping[str, Tensor],
) -> Reference:
    """Return what the checkpoint says."""
    shape = checkpoint.shape
    export.progress(f"{role}: computing reference logits in torch")
    sources = [model.hears(one) for one in example_sources(shape.source, sample.tokens)]
    more = joined.look_aheads
    return Reference(model, joined.contract, sample, shape.window, joined.features, sources, more, factors)


def _check(
    export: Export, role: str, contract: Contract, weights: Quantisation, reference: Reference | None
) -> tuple[dict[str, Any], dict[str, int]]:
    """Write the graph of ONNX Runtime's operators, and compare both; return the findings and what was fused."""
    folder = export.folder / role
    fuse: Callable[[Path], dict[str, int]] = write_fused if _fuses(contract, weights) else lambda folder: {}
    if reference is None:
        return {}, fuse(folder)
    export.progress(f"{role}: checking in ONNX Runtime")
    check, export.logits[role], fused, failure = check_model(folder, contract, reference, weights.kind, fuse)
    if role == TARGET:
        export.text, export.read = reference.sample.tokens, reference.read
    if failure is not None:
        why = f"was left out, and ONNX Runtime will run the slower {GRAPH}: {failure}"
        export.notes.append(f"{role}/{FUSED} {why}")
    return check, fused


def _fuses(contract: Contract, weights: Quantisation) -> bool:
    """Whether ONNX Runtime is to have a graph of its own operators; over a cache of int8 that has its heads stacked."""
    if contract.dtype != "float32" or contract.rounded_to == FP8:
        return False
    return weights.kind not in UNFUSED or (weights.kind == "int8" and bool(contract.rounded_to))
