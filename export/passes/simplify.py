"""Fold constants and drop what no output needs, by what comes with onnxscript."""

import onnx_ir as ir
import onnx_ir.passes.common as common
from onnxscript import optimizer, rewriter

LARGEST_FOLDED = 65536  # elements: any norm weight or frequency table, no matrix of a real model
ROUNDS = 2
# All that onnxscript's optimizer has but one: it looks for two slices in all pairs of nodes, which took most of the
# time of a deep model, and wants ends that torch does not write.
RULES = [rule for rule in rewriter._DEFAULT_REWRITE_RULES if rule.name != "SlicesSplit"]


def simplify(model: ir.Model) -> int:
    """Fold, deduplicate and clean; returns how many nodes went."""
    before = len(model.graph)
    for _ in range(ROUNDS):
        optimizer.fold_constants(
            model, onnx_shape_inference=True, input_size_limit=LARGEST_FOLDED, output_size_limit=LARGEST_FOLDED
        )
        rewriter.rewrite(model, _that_may_fit(model))
    ir.passes.Sequential(
        common.RemoveUnusedNodesPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedNodesPass(),
        common.ClearMetadataAndDocStringPass(),
    )(model)
    return before - len(model.graph)


def _that_may_fit(model: ir.Model) -> list[rewriter.RewriteRule]:
    """Return the rules whose operators a graph has: each of them is tried on every node."""
    present = {None, *(node.op_identifier() for node in model.graph.all_nodes())}  # None: a rule takes any operator
    return [rule for rule in RULES if present.issuperset(node.op_identifier() for node in rule._target_pattern)]
