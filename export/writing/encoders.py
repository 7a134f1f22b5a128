"""Export the encoders of a bundle: one for each model that has a source, or one that several share."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ...engines import Contract, EncoderEntry
from ...engines.bundle import ENCODER, GRAPH, TARGET, WEIGHTS
from ..checkpoints.checkpoint import Checkpoint, load_model
from ..passes.adapt import adaptable, linear_modules, write_adapted
from ..passes.quantise import Quantisation
from ..sources.check_encoder import Made, adapted_reference, check_encoder, encoder_reference
from ..sources.encoder import TracedEncoder, encoder_contract, shared_encoders
from ..sources.examples import example_sources
from ..sources.with_source import WithSource
from .graph import build_graph, write_graph
from .report import EncoderReport


def export_encoders(
    checkpoints: Mapping[str, Checkpoint],
    contracts: Mapping[str, Contract],
    folder: Path,
    weights: Mapping[str, Quantisation],
    text: Sequence[int] | None,
    progress: Callable[[str], None],
) -> list[EncoderReport]:
    """Write the encoders of the models that have a source, and check them on a text, if there is one.

    That of a target with room for adapters has as much.
    """
    reading = {role: one for role, one in checkpoints.items() if one.shape.source is not None}
    if not reading:
        return []
    progress("encoders: loading the weights")
    models = {role: load_model(one, contracts[role].dtype, contracts[role].vocab_size) for role, one in reading.items()}
    return [
        _export_encoder(roles, reading[roles[0]], models, contracts, folder, weights[roles[0]], text, progress)
        for roles in shared_encoders(models)
    ]


def _export_encoder(
    roles: list[str],
    checkpoint: Checkpoint,
    models: dict[str, WithSource],
    contracts: Mapping[str, Contract],
    folder: Path,
    weights: Quantisation,
    text: Sequence[int] | None,
    progress: Callable[[str], None],
) -> EncoderReport:
    """Export the encoder that these models share, which are gone then."""
    begun = time.perf_counter()
    name = ENCODER if TARGET in roles else f"{roles[0]}_{ENCODER}"
    shape = checkpoint.shape.source
    assert shape is not None
    feeding = {role: models.pop(role) for role in roles}
    encoder = feeding[roles[0]].encoder
    parameters = sum(parameter.numel() for parameter in encoder.parameters())
    contract = encoder_contract(shape, {role: contracts[role] for role in roles}, contracts[roles[0]].vocab_size)
    progress(f"{name}: tracing")
    traced = TracedEncoder(list(feeding.values()))
    graph, _ = build_graph(traced, contract, shape.longest, weights)
    sources = [] if text is None else example_sources(shape, text)
    made = encoder_reference(feeding, sources)
    adapted: tuple[Made, Mapping[str, Tensor]] | None = None
    if (room := contracts[roles[0]].adapters) is not None:
        others = tuple(f"models.{place}." for place in range(1, len(roles)))  # drafts, which have no adapters
        modules = {name: size for name, size in linear_modules(traced).items() if not name.startswith(others)}
        room = replace(room, products=adaptable(graph, modules))
        contract = replace(contract, adapters=room)
        adapted = adapted_reference(feeding, sources, traced, room)
    progress(f"{name}: writing")
    write_graph(graph, folder / name)
    nodes = len(graph.graph)
    del feeding, encoder, traced, graph  # the check holds the written weights: the checkpoint's must be gone
    gc.collect()
    check: dict[str, Any] = {}
    if contract.adapters is not None:
        write_adapted(folder / name, contract.adapters)
    if sources:
        progress(f"{name}: checking in ONNX Runtime")
        quantised = weights.kind != "none"
        check = check_encoder(folder / name / GRAPH, contract, sources, made, quantised)
        if adapted is not None:
            expected, given = adapted
            check["adapters"] = check_encoder(folder / name / GRAPH, contract, sources, expected, quantised, given)
    entry = EncoderEntry(checkpoint.label, parameters, contract, weights.kind, check)
    size = (folder / name / WEIGHTS).stat().st_size
    return EncoderReport(name, entry, nodes, size, time.perf_counter() - begun)
