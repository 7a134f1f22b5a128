"""Operators that OpenVINO's frontend lacks or would convert badly, as it gets them from us.

TensorScatter     its new rows alone: the cache is no longer part of the dataflow
Attention         PagedAttention, which writes the new rows into the caller's blocks and attends over them
GatherElements    a gather over all tokens of the call, if it picks the rows whose logits are wanted
DequantizeLinear  Convert, Subtract, Multiply, Reshape: only in this order are weights kept small and multiplied as
                  integers
"""

from math import prod
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset15 as ops
from openvino.op import _PagedAttentionExtension as PagedAttention

from ..contract import BLOCK_TOKENS, TOKEN, Contract, State
from .masks import reads, window_of

WANTED = "wanted_rows"  # marks the gather of the rows whose logits are wanted


def attention(contract: Contract, context: Any) -> Any:
    if context.has_attribute("softcap") and context.get_attribute("softcap"):
        raise ValueError("its attention has a soft-cap, which PagedAttention lacks")
    query, key, value, mask = (context.get_input(place) for place in range(4))
    states = _state_of(contract, key, "keys"), _state_of(contract, value, "values")
    heads, size = contract.heads, states[0].shape[1]
    window = window_of(mask)
    query = ops.reshape(query, ints(0, heads, -1, size), True)  # those that share keys may be stacked
    given = [_tokens_first(query, heads * size)]
    given += [_tokens_first(x, prod(state.shape)) for x, state in zip((key, value), states, strict=True)]
    # No parameters can be made here, so constants replace the two caches and the four inputs of a call.
    given += [_nothing(np.float32, *state.memory(1, BLOCK_TOKENS)) for state in states]
    given += [_nothing(np.int32, 1)] * 4
    given += [ops.constant(np.float32(context.get_attribute("scale", size**-0.5)))]
    given += [ops.constant(np.int32(window)), _nothing(np.float32, 0), _nothing(np.int32)]  # alibi, max_context_len
    given += [_nothing(np.int32, 0)] * 3  # score window, rotated blocks, their deltas
    given += [_nothing(np.float32, 0)] * 2 + [_nothing(np.int32)] * 2  # rotation table, xattention
    given += [_nothing(np.float32, 0, 0, 0, 0), _nothing(np.int32)] + [_nothing(np.int32, 0)] * 4  # sinks, eviction
    given += [_nothing(np.uint8, 0), _nothing(np.int32, 0)]  # the masks of trees
    node = PagedAttention([one if isinstance(one, ov.Output) else one.output(0) for one in given])
    for name, state in zip(("k", "v"), states, strict=True):
        node.get_rt_info()[f"num_{name}_heads"], node.get_rt_info()[f"{name}_head_size"] = state.shape
    found = ops.reshape(node.output(0), ints(-1, 1, heads, states[1].shape[1]), False)
    return ops.transpose(found, ints(0, 2, 1, 3)).outputs()  # [tokens, heads, 1, D]


def _state_of(contract: Contract, rows: Any, role: str) -> State:
    """Return the state to which the graph writes these rows, those of a call's tokens."""
    for state in contract.of_kind(TOKEN):
        if f"present_{state.name}" in rows.get_names():
            return state
    raise ValueError(f"the {role} of its attention are not the entries of one state")


def _tokens_first(x: Any, columns: int) -> Any:
    return ops.reshape(ops.transpose(x, ints(0, 2, 1, 3)), ints(-1, columns), False)


def gather_elements(context: Any) -> Any:
    values, indices = context.get_input(0), context.get_input(1)
    if not reads(indices.get_node(), "logit_rows"):
        return ops.gather_elements(values, indices, context.get_attribute("axis", 0)).outputs()
    found = ops.gather(values, _nothing(np.int64, 1), np.int64(0))  # the indices become an input later
    found.get_rt_info()[WANTED] = True
    return found.outputs()


def dequantize(context: Any) -> Any:
    x, scale = context.get_input(0), context.get_input(1)
    if not context.has_attribute("block_size"):  # FP8, with a scale for each column
        return ops.multiply(ops.convert(x, "f32"), scale).outputs()
    block, shape = context.get_attribute("block_size"), x.get_partial_shape()
    rank = shape.rank.get_length()
    axis = context.get_attribute("axis", 1) % rank
    sizes = [0 if dim.is_dynamic else dim.get_length() for dim in shape]  # 0: as it was
    split = [*sizes[:axis], -1, block, *sizes[axis + 1 :]]
    if shape.is_dynamic:  # rows of an embedding, which were looked up first
        blocks = ops.reshape(ops.convert(x, "f32"), ints(*split), True)
        whole = [*sizes[:axis], -1, *sizes[axis + 1 :]]
    else:  # reshaped before it is widened: in any other order it is widened for good when the model is compiled
        blocks = ops.convert(ops.reshape(x, ints(*split), False), "f32")
        whole = sizes
    if context.get_input_size() > 2:
        blocks = ops.subtract(blocks, ops.convert(ops.unsqueeze(context.get_input(2), ints(axis + 1)), "f32"))
    wide = ops.multiply(blocks, ops.unsqueeze(scale, ints(axis + 1)))
    return ops.reshape(wide, ints(*whole), shape.is_dynamic).outputs()


def _nothing(dtype: Any, *shape: int) -> Any:
    return ops.constant(np.zeros(shape, dtype))


def ints(*values: int) -> Any:
    return np.array(values, np.int64)
