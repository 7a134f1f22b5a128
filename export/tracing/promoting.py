"""Let torch promote types by the results that a trace knows: it would run each operator anew to see them."""

from contextlib import AbstractContextManager
from typing import Any

from torch.fx import Node
from torch.onnx._internal.fx.passes.type_promotion import _TypePromotionInterpreter, get_type_promotion_rule

from .swapping import swapped

_run_anew = _TypePromotionInterpreter.run_node


def _known(interpreter: _TypePromotionInterpreter, node: Node) -> Any:
    """Do what `run_node` does; the result of an operator is in the trace, or was put there when it was promoted."""
    if node.op != "call_function" or "val" not in node.meta:
        return _run_anew(interpreter, node)
    with interpreter._set_current_node(node):
        if rule := get_type_promotion_rule(node, interpreter.type_promotion_table):
            interpreter._maybe_promote_node(node, rule)
    return node.meta["val"]


def promoted_by_trace() -> AbstractContextManager[None]:
    """Until the block ends, take results from the trace."""
    return swapped(_TypePromotionInterpreter, run_node=_known)
