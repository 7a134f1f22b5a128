"""Make one ONNX graph of one model: trace it, rewrite it, and write it with its weights in one file beside it."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from ..engines import Contract, ExportError
from ..engines.bundle import GRAPH, WEIGHTS
from .decomposing import decomposed_in_place
from .passes.fuse_norms import fuse_norms
from .passes.fuse_rotary import fuse_rotary
from .passes.merge_projections import merge_projections
from .passes.orient_weights import orient_weights
from .passes.quantise import Known, Quantisation, nothing_known, quantise
from .passes.simplify import simplify
from .passes.stack_heads import stack_heads
from .repeating import repeat_layers
from .tracing import OPSET, TracedModel, ready_to_trace

WIDE = Quantisation()
SMALLEST_EXTERNAL = 1024  # bytes; engines want to see shapes and scalars in the graph itself


def build_graph(
    model: Any,
    contract: Contract,
    positions: int,
    weights: Quantisation = WIDE,
    known: Known = nothing_known,
) -> tuple[ir.Model, dict[str, int]]:
    """Make the model's graph, its weights still those of `model`, and count how often each rewrite fired.

    Quantised weights are rounded in `model`, too.
    """
    graph = trace(model, contract, positions)
    _refuse_other_attention(graph, contract)
    traced = list(graph.graph.initializers.values())
    fired = {"orient_weights": orient_weights(graph), "simplify": simplify(graph)}
    fired |= {"fuse_norms": fuse_norms(graph), "fuse_rotary": fuse_rotary(graph)}
    fired["simplify"] += simplify(graph)
    if weights.kind != "none":
        fired["quantise"] = quantise(graph, weights, known)
    if weights.kind == "int8":
        fired["stack_heads"] = stack_heads(graph)
    fired["merge_projections"] = merge_projections(graph)
    kept = set(graph.graph.initializers.values())
    _release(weight for weight in traced if weight not in kept)
    return graph, fired


def _refuse_other_attention(graph: ir.Model, contract: Contract) -> None:
    """Refuse a model with attention or a cache of its own, which would see neither our mask nor our buffers."""
    found = Counter(node.op_type for node in graph.graph)
    if found["Attention"] < contract.layers or found["TensorScatter"] != 2 * contract.layers:
        raise ExportError(
            f"of {contract.layers} layers, {found['Attention']} call the attention that they are given and "
            f"{found['TensorScatter'] / 2:g} the cache; a model with code of its own for either cannot be exported"
        )


def trace(model: Any, contract: Contract, positions: int) -> ir.Model:
    batch, width, rows, capacity = 2, 3, 2, 40  # any sizes, all different from one another and from 1
    past = [torch.zeros(state.memory(batch, capacity), dtype=getattr(torch, state.dtype)) for state in contract.states]
    ids = torch.zeros(batch, width, dtype=torch.int64)
    start = torch.zeros(batch, dtype=torch.int64)
    depths = torch.zeros(batch, width, dtype=torch.int64)
    ancestors = torch.zeros(batch, width, width, dtype=torch.bool)
    logit_rows = torch.zeros(batch, rows, dtype=torch.int64)
    cache_dims = {0: "batch", 2: "capacity"}
    with ready_to_trace(model), torch.no_grad(), decomposed_in_place():
        program = torch.onnx.export(
            TracedModel(model, positions).eval(),
            (ids, start, depths, ancestors, logit_rows, *past),
            dynamo=True,
            optimize=False,
            verbose=False,
            opset_version=OPSET,
            input_names=[spec.name for spec in contract.inputs],
            output_names=[spec.name for spec in contract.outputs],
            dynamic_shapes=(
                {0: "batch", 1: "width"},
                {0: "batch"},
                {0: "batch", 1: "width"},
                {0: "batch", 1: "width", 2: "width"},
                {0: "batch", 1: "rows"},
                tuple(cache_dims for _ in past),
            ),
        )
    assert program is not None
    graph = program.model.clone()  # a fresh one: the program's own remembers even weights it dropped
    own_names = {weight.data_ptr(): name for name, weight in model.named_parameters()}  # one name for tied weights
    for value in list(graph.graph.initializers.values()):
        tensor = getattr(value.const_value, "raw", None)
        address = tensor.data_ptr() if isinstance(tensor, torch.Tensor) else None
        value.name = own_names.get(address, str(value.name).removeprefix("model."))  # the traced module is a wrapper
    repeat_layers(graph.graph, model, contract.layers)
    return graph


def write_graph(graph: ir.Model, folder: Path) -> None:
    """Write `model.onnx` and `weights.bin`, one weight at a time; afterwards the graph in memory has none."""
    folder.mkdir()
    graph.producer_name = "trt-spec"
    ir.save(
        graph,
        folder / GRAPH,
        external_data=WEIGHTS,
        size_threshold_bytes=SMALLEST_EXTERNAL,
        max_workers=1,
    )
    _release(graph.graph.initializers.values())


def _release(weights: Iterable[ir.Value]) -> None:
    """Let go of the checkpoint's tensors: onnxscript's rules keep every value of the last graph they saw alive."""
    for weight in weights:
        weight.const_value = None
