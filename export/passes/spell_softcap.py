"""Write attention with a soft cap as the nodes it is made of: TensorRT's own attention has no cap."""

import onnx_ir as ir
from onnxscript.rewriter import pattern


class _SpelledSoftcap(pattern.RewriteRuleClassBase):  # type: ignore[misc]  # onnxscript leaves its rules untyped
    def pattern(self, op, query, key, value, mask):  # type: ignore[no-untyped-def]
        return op.Attention(query, key, value, mask, _outputs=["attended"])

    def check(self, op, attended, query, key, **_):  # type: ignore[no-untyped-def]
        result = pattern.MatchResult()
        if not attended.producer().attributes.get_float("softcap", 0.0):
            return result.fail("the scores have no cap", attended)
        for value in (query, key):
            if value.shape is None or not all(isinstance(size, int) for size in value.shape[1:]):
                return result.fail("the shapes are not fixed", value)
        return result

    def rewrite(self, op, attended, query, key, value, mask):  # type: ignore[no-untyped-def]
        attributes = attended.producer().attributes
        _, heads, width, size = query.shape
        _, kv_heads, capacity, _ = key.shape

        def scalar(number: float):  # type: ignore[no-untyped-def]
            return op.Constant(value=ir.tensor(number, dtype=ir.DataType.FLOAT))

        def sized(tensor: ir.Value, *sizes: int):  # type: ignore[no-untyped-def]
            return op.Reshape(tensor, op.Constant(value_ints=[0, *sizes]))

        # Query heads that share a key head become more rows of one product.
        grouped = sized(query, kv_heads, heads // kv_heads * width, size)
        scores = op.MatMul(grouped, op.Transpose(key, perm=[0, 1, 3, 2]))
        scores = op.Cast(sized(scores, heads, width, capacity), to=ir.DataType.FLOAT)
        cap = attributes.get_float("softcap")
        capped = op.Mul(op.Tanh(op.Mul(scores, scalar(attributes.get_float("scale") / cap))), scalar(cap))
        weights = op.Softmax(op.Where(mask, capped, scalar(-1e30)), axis=-1)
        weights = sized(op.Cast(weights, to=value.dtype), kv_heads, heads // kv_heads * width, capacity)
        return sized(op.MatMul(weights, value), heads, width, size)


def spell_softcap(model: ir.Model) -> int:
    """Write out each attention that has a cap; returns how many. Their shapes must be fixed."""
    return int(pattern.RewriteRuleSet([_SpelledSoftcap.rule()]).apply_to_model(model))
