"""Let a cache of eight bits keep what is written unrounded, so that a check can tell rounding from what is wrong."""

import onnx_ir as ir
import onnx_ir.passes.common as common

from ...engines import EIGHT_BITS, FP8

NARROW = {"int8": ir.DataType.INT8, FP8: ir.DataType.FLOAT8E4M3FN}
ROUNDING = ("Cast", "Clip", "Max", "Min", "Round")  # the last nodes before a write
assert set(NARROW) == set(EIGHT_BITS)


def unround(model: ir.Model) -> int:
    """Return how many states are kept in float32 now; each is written as it was before it was rounded."""
    graph, fired = model.graph, 0
    for scatter in [node for node in graph if node.op_type == "TensorScatter"]:
        past, present = scatter.inputs[0], scatter.outputs[0]
        if past is None or past.dtype not in NARROW.values():
            continue
        scatter.replace_input_with(1, before_rounding(scatter))
        past.dtype = present.dtype = ir.DataType.FLOAT
        fired += 1
    common.RemoveUnusedNodesPass()(model)
    return fired


def before_rounding(scatter: ir.Node) -> ir.Value:
    """Return what a node writes to a state of eight bits, as it was before it was rounded."""
    entries = scatter.inputs[1]
    assert entries is not None
    while (maker := entries.producer()) is not None and maker.op_type in ROUNDING:
        assert maker.inputs[0] is not None
        entries = maker.inputs[0]
    return entries
