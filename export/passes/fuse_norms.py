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
    """Compute a norm of what is wider than its scale, as T5's is, in the wider dtype, and cast what it gives."""
    hidden, scale = node.inputs
    found = node.outputs[0]
    assert hidden is not None
    assert scale is not None
    if hidden.dtype != ir.DataType.FLOAT or found.dtype in (hidden.dtype, None):
        return
    wide = ir.node("Cast", [scale], {"to": int(hidden.dtype)})
    narrow = ir.node("Cast", [found], {"to": int(found.dtype)})
    narrow.outputs[0].shape, narrow.outputs[0].type = found.shape, found.type
    found.replace_all_uses_with(narrow.outputs[0])
    narrow.replace_input_with(0, found)
    found.dtype = hidden.dtype
    node.replace_input_with(1, wide.outputs[0])
    graph.insert_before(node, [wide])
    graph.insert_after(node, [narrow])
