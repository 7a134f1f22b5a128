"""Make one ONNX graph of one model: trace it, rewrite it, and write it with its weights in one file beside it."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from errno import ENOSPC
from inspect import signature
from os import strerror
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from ...engines import CALL, IMAGE, AnyContract, Contract, ExportError, TensorSpec, VisionContract
from ...engines.bundle import FUSED, GRAPH, WEIGHTS
from ..passes.absorb_lines import absorb_lines
from ..passes.divide_keys import NO_FACTORS, divide_keys
from ..passes.fuse_norms import fuse_norms
from ..passes.fuse_rotary import fuse_rotary
from ..passes.group_queries import group_queries
from ..passes.merge_projections import merge_projections
from ..passes.orient_weights import orient_weights
from ..passes.quantise import Known, Quantisation, nothing_known, quantise
from ..passes.rewriting import Rewrite, rewritten
from ..passes.scale_scores import scale_scores
from ..passes.share_table import share_table
from ..passes.simplify import simplify
from ..passes.stack_heads import stack_heads
from ..seeing.traced import TracedSeeing, TracedSeeingHead
from ..sources.traced import TracedWithSource
from ..sources.with_source import WithSource
from ..special import ready_to_trace
from ..tracing.cache import OPSET
from ..tracing.decomposing import decomposed_in_place
from ..tracing.entries import forget_lengths
from ..tracing.hidden_states import NO_FEATURES, Features
from ..tracing.marks import name_marked
from ..tracing.modules import TracedModel, TracedRecurrent
from ..tracing.promoting import promoted_by_trace
from ..tracing.repeating import depth_of, repeat_layers

WIDE = Quantisation()
# The rewrites of a graph, in their order.
UNQUANTISED: tuple[Rewrite, ...] = (orient_weights, simplify, fuse_norms, fuse_rotary, simplify)
STORED: dict[str, tuple[Rewrite, ...]] = {"int8": (stack_heads,)}  # by how its weights are quantised then
LAST: tuple[Rewrite, ...] = (merge_projections, share_table)
OF_ONNX_RUNTIME: tuple[Rewrite, ...] = (group_queries, absorb_lines, scale_scores)
SMALLEST_EXTERNAL = 1024  # bytes; engines want to see shapes and scalars in the graph itself


def build_graph(
    model: Any,
    contract: AnyContract,
    positions: int,
    weights: Quantisation = WIDE,
    known: Known = nothing_known,
    features: Mapping[str, Features] = NO_FEATURES,
    factors: Mapping[str, Tensor] = NO_FACTORS,
) -> tuple[ir.Model, dict[str, int]]:
    """Make the graph of a model, a head or an encoder, its weights still its own, and count what each rewrite found.

    A target also makes the `features` that heads read, by the name of the state. Quantised weights are rounded in
    `model` and in `features`, too. Keys are divided by `factors`, by the name of the state, before they are rounded.
    """
    graph = trace(model, contract, positions, features)
    if isinstance(contract, Contract):
        _refuse_other_attention(graph, contract)
    traced = list(graph.graph.initializers.values())
    fired = {"divide_keys": divide_keys(graph, factors)} | rewritten(graph, UNQUANTISED)
    if weights.kind != "none":
        fired["quantise"] = quantise(graph, weights, known)
    fired |= rewritten(graph, STORED.get(weights.kind, ()) + LAST)
    name_marked(graph)
    forget_lengths(graph.graph)
    kept = set(graph.graph.initializers.values())
    _release(weight for weight in traced if weight not in kept)
    return graph, fired


def _refuse_other_attention(graph: ir.Model, contract: Contract) -> None:
    """Refuse a model with attention or a cache of its own, which would see neither our mask nor our buffers."""
    found = Counter(node.op_type for node in graph.graph)
    if not contract.kept:
        return
    written = found["TensorScatter"] - len(contract.aliases) + 2 * contract.layers
    if found["Attention"] < contract.layers or written != 2 * contract.layers:
        raise ExportError(
            f"of {contract.layers} layers, {found['Attention']} call the attention that they are given and "
            f"{written / 2:g} the cache; a model with code of its own for either cannot be exported"
        )


def _traced(model: Any, contract: AnyContract, positions: int, features: Mapping[str, Features]) -> Any:
    """Return the module that is traced of a model."""
    if not isinstance(contract, Contract):  # an encoder
        return model
    if contract.of_kind(CALL):
        return TracedSeeingHead(model, contract.vocab_size) if contract.image_size else model.traced()
    names = [one.name for one in contract.states]
    if isinstance(model, WithSource):
        return TracedWithSource(model, positions, names, contract.capabilities)
    if contract.of_kind(IMAGE):
        return TracedSeeing(model, positions, features, contract)
    return (TracedRecurrent if contract.recurrent else TracedModel)(model, positions, features, names)


def trace(
    model: Any, contract: AnyContract, positions: int, features: Mapping[str, Features] = NO_FEATURES
) -> ir.Model:
    is_head = isinstance(contract, Contract) and bool(contract.of_kind(CALL))
    traced = _traced(model, contract, positions, features)
    names = [_symbols(spec) for spec in contract.inputs]
    places = _named_parameters(traced.forward)  # the others are `*past`
    with ready_to_trace(model), torch.no_grad():
        with decomposed_in_place(), promoted_by_trace():
            program = torch.onnx.export(
                traced.eval(),
                tuple(map(_example, contract.inputs)),
                dynamo=True,
                optimize=False,
                verbose=False,
                opset_version=OPSET,
                input_names=[spec.name for spec in contract.inputs],
                output_names=[spec.name for spec in contract.outputs],
                dynamic_shapes=(*names[:places], *([tuple(names[places:])] if names[places:] else [])),
            )
        assert program is not None
        graph = program.model.clone()  # a fresh one: the program's own remembers even weights it dropped
        own_names = {weight.data_ptr(): name for name, weight in model.named_parameters()}  # one name for tied weights
        own_names |= {
            weight.data_ptr(): f"{state}.{name}"
            for state, one in features.items()
            for name, weight in one.named_parameters()
        }
        for value in list(graph.graph.initializers.values()):
            tensor = getattr(value.const_value, "raw", None)
            address = tensor.data_ptr() if isinstance(tensor, torch.Tensor) else None
            outer = str(value.name).removeprefix("model.")  # the traced module is a wrapper
            value.name = own_names.get(address, outer)
        if isinstance(contract, VisionContract):
            for value, spec in zip(graph.graph.outputs, contract.outputs, strict=True):
                value.shape = ir.Shape(spec.shape)  # so many entries that torch would name a product of sizes
        if isinstance(contract, Contract) and contract.kept:
            repeat_layers(graph.graph, model, contract.layers if is_head else depth_of(model))
    return graph


def _named_parameters(function: Callable[..., object]) -> int:
    return sum(one.kind is one.POSITIONAL_OR_KEYWORD for one in signature(function).parameters.values())


def _example(spec: TensorSpec) -> torch.Tensor:
    # any sizes will do, none of them 1
    sizes = {"batch": 2, "width": 3, "tail": 6, "rows": 2, "capacity": 40, "slots": 12, "pending": 5, "source": 7}
    sizes |= {"entries": 9, "tiles": 3, "patches": 24, "image_height": 84, "image_width": 140}
    shape = [sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape]
    return torch.zeros(shape, dtype=getattr(torch, spec.dtype))


def _symbols(spec: TensorSpec) -> dict[int, str]:
    return {place: dim for place, dim in enumerate(spec.shape) if isinstance(dim, str)}


def write_graph(graph: ir.Model, folder: Path) -> None:
    """Write `model.onnx` and `weights.bin`, one weight at a time; afterwards the graph in memory has none."""
    folder.mkdir()
    graph.producer_name = "trt-spec"
    try:
        ir.save(
            graph,
            folder / GRAPH,
            external_data=WEIGHTS,
            size_threshold_bytes=SMALLEST_EXTERNAL,
            max_workers=1,
        )
    except OSError as error:
        if error.errno is None:  # numpy says no more than how many numbers it wrote
            raise OSError(ENOSPC, strerror(ENOSPC)) from error
        raise
    require_weights(folder / GRAPH)
    _release(graph.graph.initializers.values())


def require_weights(file: Path) -> None:
    """Refuse weights that end too early: numpy writes them, and loses the last bytes on a full disk without a word."""
    values, weights = ir.load(file).graph.initializers.values(), file.with_name(WEIGHTS)
    external = [one for value in values if isinstance(one := value.const_value, ir.ExternalTensor)]
    ends = max(((one.offset or 0) + (one.length or 0) for one in external), default=0)
    if external and weights.stat().st_size < ends:
        raise OSError(ENOSPC, strerror(ENOSPC), str(weights))


def write_fused(folder: Path) -> dict[str, int]:
    """Write beside a graph one with operators that ONNX Runtime has for parts of it, and count them."""
    graph = ir.load(folder / GRAPH)
    fired = rewritten(graph, OF_ONNX_RUNTIME)
    if any(fired.values()):
        ir.save(graph, folder / FUSED)
    return fired


def _release(weights: Iterable[ir.Value]) -> None:
    """Let go of the checkpoint's tensors: onnxscript's rules keep every value of the last graph they saw alive."""
    for weight in weights:
        weight.const_value = None
