"""Make one RMSNormalization node of each root-mean-square norm, by onnxscript's rule."""

import onnx_ir as ir
from onnxscript.rewriter.rules.fusion import _rms_normalization as rule


def fuse_norms(model: ir.Model) -> int:
    fired = int(rule.fuse_rms_normalization(model))
    for node in list(model.graph):
        if node.op_type == "RMSNormalization":
            _norm_in_one_dtype(model.graph, node)
    return fired


def _norm_in_one_dtype(graph: ir.Graph, node: ir.Node) -> None:
    """Norm in float32 where what is normed or its scale is, as T5's and Kimi's are, and cast what is narrower."""
    wide, found = ir.DataType.FLOAT, node.outputs[0]
    narrow, dtypes = found.dtype, {value.dtype for value in (*node.inputs, found) if value is not None}
    if narrow is None or wide not in dtypes:
        return
    for place, value in enumerate(node.inputs):
        if value is not None and value.dtype != wide:
            cast = ir.node("Cast", [value], {"to": int(wide)})
            node.replace_input_with(place, cast.outputs[0])
            graph.insert_before(node, [cast])
    if narrow != wide:
        cast = ir.node("Cast", [found], {"to": int(narrow)})
        cast.outputs[0].shape, cast.outputs[0].type = found.shape, found.type
        found.replace_all_uses_with(cast.outputs[0])
        cast.replace_input_with(0, found)
        found.dtype = wide
        graph.insert_after(node, [cast])
