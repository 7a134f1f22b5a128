"""Write attention of several tokens so that TensorRT skips the dead part of the cache, and copies none of it per head.

Its compiler copies the cache for heads that share a key head: here they become more rows of one. Its kernels skip keys
that no row sees under a mask that is added, not under the booleans that a window makes, even with the lengths of the
keys beside it.
"""

from math import inf

import onnx_ir as ir
from onnxscript.rewriter import pattern


class _PackedQueries(pattern.RewriteRuleClassBase):  # type: ignore[misc]  # onnxscript leaves its rules untyped
    def pattern(self, op, query, key, value, mask):  # type: ignore[no-untyped-def]
        return op.Attention(query, key, value, mask, _outputs=["attended"])

    def check(self, op, query, key, mask, **_):  # type: ignore[no-untyped-def]
        result = pattern.MatchResult()
        if mask.dtype != ir.DataType.BOOL:
            return result.fail("the mask is added already", mask)
        for value in (query, key):
            if value.dtype is None or value.shape is None or not all(isinstance(dim, int) for dim in value.shape[1:]):
                return result.fail("the shapes are not fixed", value)
        if query.shape[2] == 1:
            return result.fail("its kernel for one token reads all of the cache, and in place", query)
        return result

    def rewrite(self, op, attended, query, key, value, mask):  # type: ignore[no-untyped-def]
        (_, heads, width, size), kv_heads = query.shape, key.shape[1]
        shared = heads // kv_heads

        def scalar(number: float):  # type: ignore[no-untyped-def]
            return op.Constant(value=ir.tensor(number, dtype=query.dtype))

        def sized(tensor: ir.Value, *sizes: int):  # type: ignore[no-untyped-def]
            return op.Reshape(tensor, op.Constant(value_ints=[0, *sizes]))

        def attend(queries: ir.Value, seen: ir.Value):  # type: ignore[no-untyped-def]
            added = op.Where(seen, scalar(0.0), scalar(-inf))
            return op.Attention(queries, key, value, added, **attended.producer().attributes)

        if shared == 1:
            return attend(query, mask)
        packed = attend(sized(query, kv_heads, shared * width, size), op.Concat(*[mask] * shared, axis=2))
        return sized(packed, heads, width, size)


def pack_queries(model: ir.Model) -> int:
    """Write each so; returns how many there were. Their shapes must be fixed."""
    return int(pattern.RewriteRuleSet([_PackedQueries.rule()]).apply_to_model(model))
