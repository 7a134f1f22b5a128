"""Fold constants and drop what no output needs, by the optimizer that comes with onnxscript."""

import onnx_ir as ir
import onnx_ir.passes.common as common
from onnxscript.optimizer import optimize_ir

LARGEST_FOLDED = 65536  # elements: any norm weight or frequency table, no matrix of a real model


def simplify(model: ir.Model) -> int:
    """Fold, deduplicate and clean; returns how many nodes went."""
    before = len(model.graph)
    optimize_ir(model, input_size_limit=LARGEST_FOLDED, output_size_limit=LARGEST_FOLDED)
    common.CommonSubexpressionEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    common.ClearMetadataAndDocStringPass()(model)
    return before - len(model.graph)
