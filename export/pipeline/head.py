"""Export a head that was joined to its target."""

import time
from typing import Any

import torch

from ...engines import ModelEntry
from ...engines.bundle import GRAPH, HEAD, write_tables
from ..kinds import check_head
from ..writing.graph import build_graph, write_graph
from .export import Export


def export_head(export: Export, name: str) -> None:
    begun, loaded, weights = time.perf_counter(), export.heads[name], export.settings.draft_weights.unless_stored()
    head, contract, folder = loaded.module, loaded.contract, export.folder / name
    parameters = sum(parameter.numel() for parameter in head.parameters())
    export.progress(f"{name}: tracing")
    graph, fired = build_graph(head, contract, contract.max_length, weights)
    export.progress(f"{name}: writing")
    write_graph(graph, folder)
    if tables := head.tables():
        write_tables(folder, {key: table.detach().numpy() for key, table in tables.items()})
    check: dict[str, Any] = {}
    if export.text is not None:
        export.progress(f"{name}: checking in ONNX Runtime")
        tokens, quantised = torch.tensor(export.text), weights.kind != "none"
        check, logits = check_head(folder / GRAPH, contract, head, tokens, export.read[name], quantised)
        check |= {"overlap": loaded.readings}
        export.logits[name] = logits
    export.notes += loaded.notes
    entry = ModelEntry(HEAD, loaded.label, name, parameters, contract, weights.kind, check, masks=head.masks)
    export.report(name, entry, len(graph.graph), fired, begun)
