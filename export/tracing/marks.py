"""Mark values of a trace, so that a rewrite of the written graph finds them by their names."""

import onnx_ir as ir
import torch
from torch import Tensor

DOMAIN = "trt_spec.marks"


def marked(what: str, value: Tensor) -> Tensor:
    """Return the same value; in the graph, its name will begin so."""
    return torch.onnx.ops.symbolic(f"{DOMAIN}::{what}", [value], dtype=value.dtype, shape=value.shape, version=1)


def name_marked(model: ir.Model) -> int:
    """Take the marks out of a graph, and name what they marked; returns how many there were."""
    marks = [node for node in model.graph if node.domain == DOMAIN]
    for number, node in enumerate(marks):
        value = node.inputs[0]
        assert value is not None
        node.outputs[0].replace_all_uses_with(value)
        value.name = f"{node.op_type}.{number}"
        model.graph.remove(node, safe=True)
    model.opset_imports.pop(DOMAIN, None)
    return len(marks)
