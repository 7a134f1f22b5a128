"""Turns a bundle's ONNX graph into an OpenVINO model on packed tokens, whose cache is blocks that the caller owns.

OpenVINO's frontend reads the graph with operators of ours in it. The graph runs with the tokens of a call as its batch,
each of width 1, and `start` as their positions. So it takes lines of tokens only, no trees.
"""

from collections.abc import Callable, Set
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import PartialShape, Type
from openvino import opset15 as ops
from openvino.frontend.onnx import ConversionExtension

from ..contract import Contract, Dim, TensorSpec
from ..errors import EngineError, first_line
from .operators import WANTED, attention, dequantize, gather_elements, ints

# The places of PagedAttention's inputs that the engine fills, with their types and ranks.
CALL_INPUTS = {
    "past_lens": (5, Type.i32, 1),  # entries before the first token of each sequence
    "subsequence_begins": (6, Type.i32, 1),  # the place of its first token
    "block_indices": (7, Type.i32, 1),
    "block_indices_begins": (8, Type.i32, 1),  # the place of its first block
    "max_context_len": (12, Type.i32, 0),
}
KEY_CACHE, VALUE_CACHE = 3, 4


def paged_model(graph: Path, contract: Contract) -> Any:
    """Read the graph as an `ov.Model` with inputs for tokens, positions, blocks and wanted rows; refuse by name."""
    core, reasons = ov.Core(), []

    def telling(convert: Callable[[Any], Any], context: Any) -> Any:
        try:
            return convert(context)
        except ValueError as error:
            reasons.append(str(error))
            raise

    ours: dict[str, Callable[[Any], Any]] = {
        "TensorScatter": lambda context: [context.get_input(1)],
        "Attention": partial(attention, contract),
        "GatherElements": gather_elements,
        "DequantizeLinear": dequantize,
    }
    for name, convert in ours.items():
        core.add_extension(ConversionExtension(name, partial(telling, convert)))
    try:
        model = core.read_model(str(graph))
    except Exception as error:  # the bindings raise unrelated types
        reason = reasons[0] if reasons else first_line(error)
        raise EngineError(f"engine openvino cannot run {graph}: {reason}; use engine onnxruntime") from error
    inputs = _specs(model.inputs, contract.inputs, shapes=True)
    contract.check(str(graph), inputs, _specs(model.outputs, contract.outputs, shapes=False))  # these are new rows now
    _refuse_experts(model, graph)
    return _packed(model, graph, contract)


def _packed(model: Any, graph: Path, contract: Contract) -> Any:
    """Connect the inputs of a call, and drop every node that the logits do not need."""
    added = {name: _parameter(name, kind, [-1] * rank) for name, (_, kind, rank) in CALL_INPUTS.items()}
    caches: dict[str, Any] = {}
    for node in model.get_ordered_ops():
        if node.get_type_name() != "PagedAttentionExtension":
            continue
        for place in (KEY_CACHE, VALUE_CACHE):
            state = _state_read(node, place - 2, graph)
            caches[state] = _parameter(state, Type.dynamic, [-1] * 4)  # the plugin chooses type and shape
            node.input(place).replace_source_output(caches[state].output(0))
        for name, (place, *_) in CALL_INPUTS.items():
            node.input(place).replace_source_output(added[name].output(0))
    _refuse_other_states(contract, caches.keys(), graph)
    [result] = [one for one in model.get_results() if "logits" in one.input_value(0).get_names()]
    rows = _parameter("rows", Type.i64, [-1])
    [gather] = [node for node in model.get_ordered_ops() if WANTED in node.get_rt_info()]
    gather.input(1).replace_source_output(rows.output(0))
    given = {parameter.get_friendly_name(): parameter for parameter in model.get_parameters()}
    given["input_ids"].set_partial_shape(PartialShape([-1, 1]))
    tokens = ops.shape_of(given["start"])
    for name, value in (("depths", np.int64(0)), ("ancestors", np.bool_(True))):  # each token is by itself
        sizes = ops.concat([tokens, *[ints(1)] * (given[name].get_partial_shape().rank.get_length() - 1)], 0)
        given[name].output(0).replace(ops.broadcast(ops.constant(value), sizes).output(0))
    inputs = [given["input_ids"], given["start"], rows, *added.values(), *caches.values()]
    if contract.adapters is not None:
        inputs += [given[spec.name] for spec in contract.adapters.inputs(contract.dtype)]
    packed = ov.Model([result], inputs, "packed")
    packed.validate_nodes_and_infer_types()
    return packed


def _refuse_experts(model: Any, graph: Path) -> None:
    """Refuse weights of three dimensions, which the CPU plugin takes for a matrix, so that it fails when it runs."""
    for node in model.get_ops():
        if node.get_type_name() == "MatMul":
            weights = node.input_value(1).get_partial_shape()
            if weights.is_static and weights.rank.get_length() > 2 and weights[0].get_length() > 1:
                raise EngineError(
                    f"engine openvino cannot run {graph}: the weights of its experts have three dimensions, which "
                    "OpenVINO takes for a matrix; use engine onnxruntime"
                )


def _state_read(node: Any, place: int, graph: Path) -> str:
    """Name the state that an attention reads in one place.

    It is refused if anything else reads it: such an operator would see the new rows alone.
    """
    rows = node.input_value(place).get_node().input_value(0).get_node().input_value(0)
    name = min(str(name).removeprefix("present_") for name in rows.get_names() if name.startswith("present_"))
    readers = [one.get_node().get_type_name() for one in rows.get_target_inputs()]
    others = sorted(set(readers) - {"Result"})
    if readers.count("Transpose") != 1 or others != ["Transpose"]:
        raise EngineError(
            f"engine openvino cannot run {graph}: its cache {name} is read by more than one attention; use engine "
            "onnxruntime"
        )
    return name


def _refuse_other_states(contract: Contract, read: Set[str], graph: Path) -> None:
    """Refuse states that no attention reads: nothing would write them."""
    for state in contract.states:
        if state.name not in read:
            raise EngineError(
                f"engine openvino cannot run {graph}: its state {state} is not the keys or values of an attention; "
                "use engine onnxruntime"
            )


def _parameter(name: str, kind: Any, shape: list[int]) -> Any:
    made = ops.parameter(PartialShape(shape), kind, name)
    made.output(0).get_tensor().set_names({name})
    return made


def _specs(ports: Any, expected: tuple[TensorSpec, ...], shapes: bool) -> list[TensorSpec]:
    """Describe inputs or outputs. Open sizes are given as expected; all sizes are, unless `shapes` are compared."""
    known = {spec.name: spec.shape for spec in expected}

    def shape(name: str, sizes: Any) -> tuple[Dim, ...]:
        if name not in known or not shapes or len(known[name]) != len(sizes):
            return known.get(name, ())
        pairs = zip(known[name], sizes, strict=True)
        return tuple(dim if isinstance(dim, str) and size.is_dynamic else size.get_length() for dim, size in pairs)

    names = [(port, *port.get_names()) for port in ports]
    return [
        TensorSpec(name, port.get_element_type().to_dtype().name, shape(name, list(port.get_partial_shape())))
        for port, name in names
    ]
