"""Make one RotaryEmbedding node of each `x * cos + rotate_half(x) * sin`.

onnxscript has such a rule for float32 without an attention factor; here the angles may be scaled (yarn) and cast
(half precision) on their way.
"""

import onnx_ir as ir
from onnxscript.rewriter import pattern

STEPS_FROM_ANGLES = ("Cast", "Mul", "Cos", "Sin")


class _RotaryFusion(pattern.RewriteRuleClassBase):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__("RotaryFusion", remove_nodes=False)

    def pattern(self, op, x, cos, sin, start1, end1, start2, end2, axes1, axes2):  # type: ignore[no-untyped-def]
        first = op.Slice(x, start1, end1, [3], [1])
        second = op.Slice(x, start2, end2, [3], [1])
        rotated = op.Concat(op.Neg(second), first, axis=-1)
        return op.Add(op.Mul(x, op.Unsqueeze(cos, axes1)), op.Mul(rotated, op.Unsqueeze(sin, axes2)))

    def check(self, op, x, cos, sin, start1, end1, start2, end2, axes1, axes2, **_):  # type: ignore[no-untyped-def]
        result = pattern.MatchResult()
        if x.shape is None or len(x.shape) != 4 or not isinstance(x.shape[3], int):
            return result.fail("the rotated tensor has no known head size", x)
        half = x.shape[3] // 2
        halves = [_constant(value) for value in (start1, end1, start2)]
        if halves != [[0], [half], [half]] or (_constant(end2) or [0])[0] < x.shape[3]:
            return result.fail("the tensor is not rotated by halves", x)
        if _constant(axes1) != [1] or _constant(axes2) != [1]:
            return result.fail("the angles are not shared by the heads", cos)
        if not (_both_halves_equal(cos) and _both_halves_equal(sin)):
            return result.fail("the angles of the two halves differ", cos)
        return result

    def rewrite(self, op, x, cos, sin, **_):  # type: ignore[no-untyped-def]
        first_half = [op.Constant(value_ints=[number]) for number in (0, x.shape[3] // 2, 2, 1)]
        cos_half, sin_half = (op.Slice(angle, *first_half) for angle in (cos, sin))
        return op.RotaryEmbedding(x, cos_half, sin_half, interleaved=0, num_heads=x.shape[1])


def fuse_rotary(model: ir.Model) -> int:
    return int(pattern.RewriteRuleSet([_RotaryFusion.rule()]).apply_to_model(model))


def _constant(value: ir.Value | None) -> list[int] | None:
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return None if tensor is None else [int(number) for number in tensor.numpy().reshape(-1)]


def _both_halves_equal(angle: ir.Value) -> bool:
    """Say whether the angle comes from `Concat(f, f)` through elementwise steps."""
    node = angle.producer()
    while node is not None and node.op_type in STEPS_FROM_ANGLES:
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    return node is not None and node.op_type == "Concat" and node.inputs[0] is node.inputs[1]
