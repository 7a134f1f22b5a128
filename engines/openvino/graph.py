"""Turns a bundle's ONNX graph into an OpenVINO model on packed tokens, whose cache is blocks that the caller owns.

OpenVINO's frontend reads the graph, and four operators are given by this file:

TensorScatter     its new rows alone: the cache is no longer part of the dataflow
Attention         PagedAttention, which writes the new rows into the caller's blocks and attends over them
GatherElements    where it picks the rows whose logits are wanted: a gather over all tokens of the call
DequantizeLinear  Convert, Multiply, Reshape: only in this order are the weights kept small and multiplied as integers

The graph runs with the tokens of a call as its batch, each of width 1, and `start` as their positions. So it takes
lines of tokens only, no trees.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from openvino import PartialShape, Type
from openvino import opset15 as ops
from openvino.frontend.onnx import ConversionExtension
from openvino.op import _PagedAttentionExtension as PagedAttention

from ..contract import BLOCK_TOKENS, Contract, Dim, TensorSpec
from ..errors import EngineError, first_line

# The places of PagedAttention's inputs that the engine fills, with their types and ranks.
CALL_INPUTS = {
    "past_lens": (5, Type.i32, 1),  # entries before the first token of each sequence
    "subsequence_begins": (6, Type.i32, 1),  # where its tokens begin
    "block_indices": (7, Type.i32, 1),
    "block_indices_begins": (8, Type.i32, 1),  # where its blocks begin
    "max_context_len": (12, Type.i32, 0),
}
KEY_CACHE, VALUE_CACHE = 3, 4
SCATTER = "ScatterElementsUpdate"
WANTED = "wanted_rows"  # marks the gather of the rows whose logits are wanted


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
        "Attention": partial(_attention, contract),
        "GatherElements": _gather_elements,
        "DequantizeLinear": _dequantize,
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
    return _packed(model, graph)


def _packed(model: Any, graph: Path) -> Any:
    """Connect the inputs of a call; what is not needed for the logits falls away."""
    added = {name: _parameter(name, kind, [-1] * rank) for name, (_, kind, rank) in CALL_INPUTS.items()}
    caches = []
    attentions = [node for node in model.get_ordered_ops() if node.get_type_name() == "PagedAttentionExtension"]
    for layer, node in enumerate(attentions):
        for place, kind in ((KEY_CACHE, "key"), (VALUE_CACHE, "value")):
            _refuse_other_readers(node, place - 2, f"{kind}_{layer}", graph)
            caches.append(_parameter(f"{kind}_{layer}", Type.dynamic, [-1] * 4))  # the plugin chooses type and shape
            node.input(place).replace_source_output(caches[-1].output(0))
        for name, (place, *_) in CALL_INPUTS.items():
            node.input(place).replace_source_output(added[name].output(0))
    [result] = [one for one in model.get_results() if "logits" in one.input_value(0).get_names()]
    rows = _parameter("rows", Type.i64, [-1])
    [gather] = [node for node in model.get_ordered_ops() if WANTED in node.get_rt_info()]
    gather.input(1).replace_source_output(rows.output(0))
    given = {parameter.get_friendly_name(): parameter for parameter in model.get_parameters()}
    given["input_ids"].set_partial_shape(PartialShape([-1, 1]))
    tokens = ops.shape_of(given["start"])
    for name, value in (("depths", np.int64(0)), ("ancestors", np.bool_(True))):  # each token stands alone
        sizes = ops.concat([tokens, *[_ints(1)] * (given[name].get_partial_shape().rank.get_length() - 1)], 0)
        given[name].output(0).replace(ops.broadcast(ops.constant(value), sizes).output(0))
    inputs = [given["input_ids"], given["start"], rows, *added.values(), *caches]
    packed = ov.Model([result], inputs, "packed")
    packed.validate_nodes_and_infer_types()
    return packed


def _refuse_experts(model: Any, graph: Path) -> None:
    """The CPU plugin takes weights of three dimensions for a matrix and fails when it runs."""
    for node in model.get_ops():
        if node.get_type_name() == "MatMul":
            weights = node.input_value(1).get_partial_shape()
            if weights.is_static and weights.rank.get_length() > 2 and weights[0].get_length() > 1:
                raise EngineError(
                    f"engine openvino cannot run {graph}: the weights of its experts have three dimensions, which "
                    "OpenVINO takes for a matrix; use engine onnxruntime"
                )


def _refuse_other_readers(attention: Any, place: int, name: str, graph: Path) -> None:
    """Only attention may read the cache: an operator beside it would see the new rows alone."""
    transposed = attention.input_value(place).get_node().input_value(0).get_node()
    readers = [one.get_node().get_type_name() for one in transposed.input_value(0).get_target_inputs()]
    others = sorted(set(readers) - {"Result"})
    if readers.count("Transpose") != 1 or others != ["Transpose"]:
        raise EngineError(
            f"engine openvino cannot run {graph}: its cache {name} is read by more than one attention; use engine "
            "onnxruntime"
        )


def _parameter(name: str, kind: Any, shape: list[int]) -> Any:
    made = ops.parameter(PartialShape(shape), kind, name)
    made.output(0).get_tensor().set_names({name})
    return made


def _specs(ports: Any, expected: tuple[TensorSpec, ...], shapes: bool) -> list[TensorSpec]:
    """Describe inputs or outputs; a shape that is not to be compared, or an open size, is described as expected."""
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


# The operators.


def _attention(contract: Contract, context: Any) -> Any:
    heads, kv_heads, size = contract.heads, contract.kv_heads, contract.head_dim
    if context.has_attribute("softcap") and context.get_attribute("softcap"):
        raise ValueError("its attention has a soft-cap, which PagedAttention lacks")
    query, key, value, mask = (context.get_input(place) for place in range(4))
    window = _window(mask)
    given = [
        _tokens_first(query, heads * size),
        _tokens_first(key, kv_heads * size),
        _tokens_first(value, kv_heads * size),
    ]
    given += [
        _nothing(np.float32, 1, kv_heads, BLOCK_TOKENS, size)
    ] * 2  # stand-ins, as for the next four: no parameter
    given += [_nothing(np.int32, 1)] * 4  # can be made here
    given += [ops.constant(np.float32(context.get_attribute("scale", size**-0.5)))]
    given += [ops.constant(np.int32(window)), _nothing(np.float32, 0), _nothing(np.int32)]  # alibi, max_context_len
    given += [_nothing(np.int32, 0)] * 3  # score window, rotated blocks, their deltas
    given += [_nothing(np.float32, 0)] * 2 + [_nothing(np.int32)] * 2  # rotation table, xattention
    given += [_nothing(np.float32, 0, 0, 0, 0), _nothing(np.int32)] + [_nothing(np.int32, 0)] * 4  # sinks, eviction
    given += [_nothing(np.uint8, 0), _nothing(np.int32, 0)]  # the masks of trees
    node = PagedAttention([one if isinstance(one, ov.Output) else one.output(0) for one in given])
    for name in ("k", "v"):
        node.get_rt_info()[f"num_{name}_heads"], node.get_rt_info()[f"{name}_head_size"] = kv_heads, size
    found = ops.reshape(node.output(0), _ints(-1, 1, heads, size), False)
    return ops.transpose(found, _ints(0, 2, 1, 3)).outputs()  # [tokens, heads, 1, D]


def _tokens_first(x: Any, columns: int) -> Any:
    return ops.reshape(ops.transpose(x, _ints(0, 2, 1, 3)), _ints(-1, columns), False)


def _window(mask: Any) -> int:
    """Return how many entries a token sees, itself included; 0 if all up to itself."""
    window, causal = 0, False
    for term in _terms(mask.get_node()):
        kind, inputs = term.get_type_name(), _inputs(term)
        if kind == SCATTER and _name(inputs[2]) == "ancestors" and _is_earlier(inputs[0]):
            causal = True
        elif kind == "Greater" and _is_position(inputs[0]) and (behind := _behind(inputs[1])):
            window = behind
        elif kind == "LessEqual" and _is_position(inputs[0]) and _is_own_position(inputs[1]):
            pass  # as its ancestors say
        elif kind != "Constant" or not _constant(term):
            raise ValueError(f"its attention has a mask by {kind}, which PagedAttention lacks")
    if not causal:
        raise ValueError("its attention is not causal")
    return window


def _terms(node: Any) -> Iterator[Any]:
    node = _unshaped(node)
    if node.get_type_name() != "LogicalAnd":
        yield node
        return
    for one in _inputs(node):
        yield from _terms(one)


def _is_earlier(node: Any) -> bool:
    """Whether it says which entries were there before the call."""
    node = _unshaped(node)
    if node.get_type_name() != "Less":
        return False
    entry, start = _inputs(node)
    return not _reads(entry, "start") and _name(_unshaped(start)) == "start"


def _is_position(node: Any) -> bool:
    """Whether it says which position each entry has."""
    node = _unshaped(node)
    return node.get_type_name() == SCATTER and _is_own_position(node.input_value(2).get_node())


def _is_own_position(node: Any) -> bool:
    """Whether it says which position each token has."""
    node = _unshaped(node)
    names = [_name(_unshaped(one)) for one in _inputs(node)]
    return node.get_type_name() == "Add" and sorted(names) == ["depths", "start"]


def _behind(node: Any) -> int:
    """Return what is taken from a token's position; 0 if something else is done."""
    if node.get_type_name() != "Subtract" or not _is_own_position(node.input_value(0).get_node()):
        return 0
    return int(_constant(node.input_value(1).get_node()))


def _unshaped(node: Any) -> Any:
    """Return what a node was before it was given another shape."""
    while node.get_type_name() in ("Broadcast", "Reshape", "Unsqueeze"):
        node = node.input_value(0).get_node()
    return node


def _inputs(node: Any) -> list[Any]:
    return [node.input_value(place).get_node() for place in range(node.get_input_size())]


def _constant(node: Any) -> Any:
    if node.get_type_name() != "Constant" or node.get_data().size != 1:
        raise ValueError(f"its attention has a window by {node.get_type_name()}, expected a number")
    return node.get_data().item()


def _name(node: Any) -> str:
    """Return an input's name; of all else, nothing."""
    return str(node.output(0).get_any_name()) if node.get_type_name() == "Parameter" else ""


def _reads(node: Any, name: str) -> bool:
    """Whether a node is computed from this input, among others."""
    waiting, seen = [node], set()
    while waiting:
        one = waiting.pop()
        if _name(one) == name:
            return True
        if one.get_name() not in seen:
            seen.add(one.get_name())
            waiting += _inputs(one)
    return False


def _gather_elements(context: Any) -> Any:
    values, indices = context.get_input(0), context.get_input(1)
    if not _reads(indices.get_node(), "logit_rows"):
        return ops.gather_elements(values, indices, context.get_attribute("axis", 0)).outputs()
    found = ops.gather(values, _nothing(np.int64, 1), np.int64(0))  # the indices become an input later
    found.get_rt_info()[WANTED] = True
    return found.outputs()


def _dequantize(context: Any) -> Any:
    x, scale = context.get_input(0), context.get_input(1)
    block, shape = context.get_attribute("block_size"), x.get_partial_shape()
    rank = shape.rank.get_length()
    axis = context.get_attribute("axis", 1) % rank
    sizes = [0 if dim.is_dynamic else dim.get_length() for dim in shape]  # 0: as it was
    split = [*sizes[:axis], -1, block, *sizes[axis + 1 :]]
    if shape.is_dynamic:  # rows of an embedding, which were looked up first
        blocks = ops.reshape(ops.convert(x, "f32"), _ints(*split), True)
        whole = [*sizes[:axis], -1, *sizes[axis + 1 :]]
    else:  # reshaped before it is widened: in any other order it is widened for good when the model is compiled
        blocks = ops.convert(ops.reshape(x, _ints(*split), False), "f32")
        whole = sizes
    wide = ops.multiply(blocks, ops.unsqueeze(scale, _ints(axis + 1)))
    return ops.reshape(wide, _ints(*whole), shape.is_dynamic).outputs()


def _nothing(dtype: Any, *shape: int) -> Any:
    return ops.constant(np.zeros(shape, dtype))


def _ints(*values: int) -> Any:
    return np.array(values, np.int64)
