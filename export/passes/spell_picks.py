"""Write a pick of one index as a slice: TensorRT for RTX 1.7 crashes on Gather before a cache update by one token."""

import onnx_ir as ir
from onnxscript.rewriter import pattern

END = 2**63 - 1


class _SpelledPick(pattern.RewriteRuleClassBase):  # type: ignore[misc]  # onnxscript leaves its rules untyped
    def pattern(self, op, x, index):  # type: ignore[no-untyped-def]
        return op.Gather(x, index, _outputs=["picked"])

    def check(self, op, index, **_):  # type: ignore[no-untyped-def]
        result = pattern.MatchResult()
        if index.const_value is None or index.const_value.size != 1 or len(index.const_value.shape):
            return result.fail("the index is not one known number", index)
        return result

    def rewrite(self, op, x, index, picked):  # type: ignore[no-untyped-def]
        begin = int(index.const_value.numpy())
        axes = op.Constant(value_ints=[picked.producer().attributes.get_int("axis", 0)])
        ends = op.Constant(value_ints=[begin + 1 or END])
        return op.Squeeze(op.Slice(x, op.Constant(value_ints=[begin]), ends, axes), axes)


def spell_picks(model: ir.Model) -> int:
    """Write each as a slice; returns how many there were."""
    return int(pattern.RewriteRuleSet([_SpelledPick.rule()]).apply_to_model(model))
