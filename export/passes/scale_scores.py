"""Let the scales of a cache in eight bits multiply scores and shares of attention, which are fewer than its numbers.

For ONNX Runtime on a CPU, where entries that are widened whole pass through memory three times. No product has one row,
since that is summed in another order: a last bit can round an entry of a later layer the other way.
"""

from math import inf

import onnx_ir as ir
import onnx_ir.passes.common as common

from .nodes import Nodes
from .stack_heads import STACKED, stack_heads
from .unround import NARROW

LAST_TWO_TURNED = (0, 1, 3, 2)
WIDE = ir.DataType.FLOAT


def scale_scores(model: ir.Model) -> int:
    """Spell each attention over keys and values of eight bits; returns how many there were."""
    graph = model.graph
    if not any(value.dtype in NARROW.values() for value in graph.inputs):
        return 0
    stack_heads(model)
    fired, rewrite = 0, _Rewrite(graph)
    for node in [node for node in graph if node.op_type == "Attention" and len(node.inputs) == 4]:
        fired += rewrite.replace(node)
    graph.extend(rewrite.op.made)
    graph.sort()
    common.RemoveUnusedNodesPass()(model)
    return fired


def _parts(entries: ir.Value | None) -> tuple[ir.Value, ir.Value] | None:
    """Return the numbers of eight bits and the scales that entries are made of, if they are."""
    product = None if entries is None else entries.producer()
    if product is None or product.op_type != "Mul":
        return None
    casts = [None if value is None else value.producer() for value in product.inputs]
    parts = [cast.inputs[0] for cast in casts if cast is not None and cast.op_type == "Cast"]
    found = [part for part in parts if part is not None]
    return (found[0], found[1]) if len(found) == 2 and found[0].dtype in NARROW.values() else None


class _Rewrite:
    """The nodes that take the place of attentions, and what these share."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph, self.op = graph, Nodes(graph)
        self._biases: dict[tuple[ir.Value, bool], ir.Value] = {}

    def replace(self, node: ir.Node) -> bool:
        query, key, value, mask = node.inputs
        keys, values = _parts(key), _parts(value)
        if keys is None or values is None or query is None or mask is None:
            return False
        op, cap, [found] = self.op, node.attributes.get_float("softcap", 0.0), node.outputs
        alone = STACKED not in str(query.name)  # its head shares keys with no other, so that a token may be one row
        scale = op("Mul", self._of_columns(keys[1]), op.stored(node.attributes.get_float("scale", 1.0)))
        wide = op("Transpose", op("Cast", keys[0], to=WIDE), perm=LAST_TWO_TURNED)
        scores = op("Mul", op("MatMul", self._with_one_more(query) if alone else query, wide), scale)
        if cap:
            scores = op("Mul", op("Tanh", op("Div", scores, op.stored(cap))), op.stored(cap))
        shares = op("Softmax", op("Add", scores, self._bias(mask, alone)), axis=-1)
        weighted = op("Mul", shares, self._of_columns(values[1]))
        rows = op("MatMul", weighted, op("Cast", values[0], to=WIDE))
        own = op("Slice", rows, op.stored([0]), op.stored([-1]), op.stored([2])) if alone else rows
        own.shape, own.type = found.shape, found.type
        found.replace_all_uses_with(own)
        self._graph.remove(node, safe=True)
        return True

    def _of_columns(self, scales: ir.Value) -> ir.Value:
        """Return scales [B, heads, T, 1] as [B, heads, 1, T]."""
        return self.op("Cast", self.op("Transpose", scales, perm=LAST_TWO_TURNED), to=WIDE)

    def _with_one_more(self, rows: ir.Value) -> ir.Value:
        """Return rows with the first of them after them once more."""
        first = self.op("Slice", rows, self.op.stored([0]), self.op.stored([1]), self.op.stored([2]))
        return self.op("Concat", rows, first, axis=2)

    def _bias(self, mask: ir.Value, alone: bool) -> ir.Value:
        """Return what is added to the scores."""
        if (mask, alone) not in self._biases:
            seen = mask.dtype == ir.DataType.BOOL
            added = self.op("Where", mask, self.op.stored(0.0), self.op.stored(-inf)) if seen else mask
            self._biases[mask, alone] = self._with_one_more(added) if alone else added
        return self._biases[mask, alone]
