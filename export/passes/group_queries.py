"""Let ONNX Runtime's GroupQueryAttention attend: it reads of a cache what is filled, and writes new entries itself.

In it a token sees at most the entries up to its own, and of those what the mask says. No token of a round sees more,
since each comes after those that it follows.
"""

from collections.abc import Callable
from math import inf
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as common

from .nodes import CONTRIB, TURNED, Nodes

SIZES = range(32, 129, 16)  # of heads: with these one of several tokens has the same bits whatever is beside it


def group_queries(model: ir.Model) -> int:
    """Give it each attention over keys and values that are written for it alone; returns how many there were."""
    found = [node for node in model.graph if _fits(node)]
    if found:
        rewrite = _Rewrite(model.graph)
        for node in found:
            rewrite.replace(node)
        rewrite.finish()
        model.opset_imports[CONTRIB] = 1
        common.RemoveUnusedNodesPass()(model)
    return len(found)


def _fits(node: ir.Node) -> bool:
    if node.op_type != "Attention" or len(node.inputs) != 4 or node.attributes.get_int("is_causal"):
        return False
    (heads, size), key, value = (_heads(one) for one in node.inputs[:3])
    written = all(_is_written_for_one(one) for one in node.inputs[1:3])
    turned = [use.node for use in node.outputs[0].uses()]
    known = node.inputs[3] is not None and len(turned) == 1 and _turns(turned[0])
    return written and known and key == value == (key[0], size) and heads > 0 and size in SIZES


def _heads(value: ir.Value | None) -> tuple[int, int]:
    """Return how many heads `[B, heads, rows, D]` has, and D; 0 for what is not known."""
    shape = value.shape if value is not None and value.shape is not None else (0, 0, 0, 0)
    heads, size = (dim if isinstance(dim, int) else 0 for dim in (shape[1], shape[3]))
    return heads, size


def _turns(node: ir.Node) -> bool:
    return node.op_type == "Transpose" and tuple(node.attributes["perm"].as_ints()) == TURNED


def _is_written_for_one(cache: ir.Value | None) -> bool:
    writer = None if cache is None or len(cache.uses()) > 1 else cache.producer()
    return writer is not None and writer.op_type == "TensorScatter"


def _holds(value: ir.Value | None, columns: int) -> bool:
    """Say whether a tensor is `[B, S, columns]`."""
    return value is not None and value.shape is not None and list(value.shape[2:]) == [columns]


class _Rewrite:
    """The nodes that take the place of attentions, and what these share."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph, self._op = graph, Nodes(graph)
        self._shared: dict[tuple[str, ir.Value], ir.Value] = {}
        self._old: list[ir.Node] = []

    def replace(self, node: ir.Node) -> None:
        query, key, value, mask = map(_known, node.inputs)
        writers = [_known(one.producer()) for one in (key, value)]
        (past, new, start), (past_value, new_value, _) = (map(_known, writer.inputs) for writer in writers)
        heads, size = _heads(query)
        kv_heads, _ = _heads(key)
        found, *written = self._op.several(
            3,
            "GroupQueryAttention",
            *(self._side_by_side(one) for one in (query, new, new_value)),
            *(past, past_value),
            self._once("lengths", start, lambda: self._lengths(start, new)),
            self._once("capacity", start, lambda: self._capacity(past)),
            *(None, None, None),
            self._once("bias", mask, lambda: self._bias(mask)),
            *(None, None, None, None, None),
            self._once("widths", start, lambda: self._widths(start, new)),
            domain=CONTRIB,
            num_heads=heads,
            kv_num_heads=kv_heads,
            scale=node.attributes.get_float("scale", size**-0.5),
            softcap=node.attributes.get_float("softcap", 0.0),
        )
        for old, one in zip((key, value), written, strict=True):
            one.shape, one.type = old.shape, old.type
            old.replace_all_uses_with(one, replace_graph_outputs=True)
            one.name, old.name = old.name, None
        found.type = query.type
        [turn] = (use.node for use in node.outputs[0].uses())
        turned = turn.outputs[0]
        joins = [use.node for use in turned.uses()]
        if all(join.op_type == "Reshape" and _holds(join.outputs[0], heads * size) for join in joins):
            for join in joins:
                join.outputs[0].replace_all_uses_with(found)
            self._old += joins
        else:
            apart = self._op("Reshape", found, self._op.stored([0, 0, heads, size]))
            apart.shape, apart.type = turned.shape, turned.type
            turned.replace_all_uses_with(apart)
        self._old += [turn, node, *writers]

    def finish(self) -> None:
        self._graph.remove(self._old, safe=True)
        self._graph.extend(self._op.made)
        self._graph.sort()

    def _side_by_side(self, value: ir.Value) -> ir.Value:
        """Return `[B, heads, S, D]` as `[B, S, heads * D]`, before it was turned if it was; a rotation goes with it."""
        made = _known(value.producer())
        heads, size = _heads(value)
        if made.op_type == "RotaryEmbedding" and _heads(made.inputs[0]) == (heads, size):
            before, *angles = made.inputs
            asked = self._side_by_side(_known(before))
            return self._op(made.op_type, asked, *angles, **{**made.attributes, "num_heads": heads})
        rows = _known(made.inputs[0]) if _turns(made) else self._op("Transpose", value, perm=TURNED)
        parted = rows.producer()
        if parted is not None and parted.op_type == "Reshape" and _holds(parted.inputs[0], heads * size):
            whole: ir.Value = _known(parted.inputs[0])
            return whole
        return self._op("Reshape", rows, self._op.stored([0, 0, heads * size]))

    def _once(self, what: str, of: ir.Value, make: Callable[[], ir.Value]) -> ir.Value:
        if (what, of) not in self._shared:
            self._shared[what, of] = make()
        return self._shared[what, of]

    def _bias(self, mask: ir.Value) -> ir.Value:
        """Return what is added to the scores; a mask of booleans says where that is nothing, and where all is taken."""
        if mask.dtype != ir.DataType.BOOL:
            return mask
        return self._op("Where", mask, self._op.stored(0.0), self._op.stored(-inf))

    def _lengths(self, start: ir.Value, new: ir.Value) -> ir.Value:
        """Return how many entries each row has with its new ones, less one `[B]`."""
        last = self._op("Sub", self._dim(new, 2), self._op.stored([1]))
        return self._int32(self._op("Add", start, last))

    def _widths(self, start: ir.Value, new: ir.Value) -> ir.Value:
        """Return how many tokens each row has `[B]`: all have as many, and the operator asks for that."""
        return self._int32(self._op("Expand", self._dim(new, 2), self._op("Shape", start)))

    def _capacity(self, past: ir.Value) -> ir.Value:
        return self._int32(self._op("Squeeze", self._dim(past, 2)))

    def _dim(self, value: ir.Value, axis: int) -> ir.Value:
        return self._op("Shape", value, start=axis, end=axis + 1)

    def _int32(self, value: ir.Value) -> ir.Value:
        return self._op("Cast", value, to=ir.DataType.INT32)


def _known(value: Any) -> Any:
    assert value is not None
    return value
