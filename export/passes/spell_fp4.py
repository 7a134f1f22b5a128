"""Spell numbers of four bits (E2M1) as whole ones, for engines that have no such type."""

import onnx_ir as ir

from ...engines.onnx_types import E2M1

DOUBLED = [int(2 * number) for number in E2M1]


def spell_fp4(model: ir.Model) -> int:
    """Look each number up by its bits, doubled, and halve its scale in float32; returns how many matrices there were.

    The weights are the same, bit for bit, and so is their file.
    """
    graph = model.graph
    widening = [node for node in graph if node.op_type == "DequantizeLinear" and _is_fp4(node.inputs[0])]
    if not widening:
        return 0
    tensors = ir.tensor(DOUBLED, ir.DataType.INT8, "fp4.doubled"), ir.tensor(0.5, name="fp4.half")
    doubled, half = (ir.Value(name=one.name, const_value=one) for one in tensors)
    graph.register_initializer(doubled)
    graph.register_initializer(half)
    for node in widening:
        numbers, scales, *_ = node.inputs
        assert numbers is not None
        _as_bits(numbers)
        places = ir.node("Cast", [numbers], {"to": ir.DataType.INT32})
        found = ir.node("Gather", [doubled, places.outputs[0]])
        halved = ir.node("Mul", [scales, half])
        graph.insert_before(node, [places, found, halved])
        node.replace_input_with(0, found.outputs[0])
        node.replace_input_with(1, halved.outputs[0])
    return len(widening)


def _is_fp4(value: ir.Value | None) -> bool:
    return value is not None and value.dtype == ir.DataType.FLOAT4E2M1


def _as_bits(numbers: ir.Value) -> None:
    """Take the bits of stored numbers for whole ones from 0 to 15."""
    tensor, kind = numbers.const_value, ir.DataType.UINT4
    if isinstance(tensor, ir.ExternalTensor):
        place = tensor.location, tensor.offset, tensor.length
        bits: ir.TensorProtocol = ir.ExternalTensor(
            *place, kind, shape=tensor.shape, name=tensor.name, base_dir=tensor.base_dir
        )
    else:
        assert tensor is not None
        bits = ir.Tensor(tensor.numpy().view(kind.numpy()), kind, name=tensor.name)
    numbers.const_value, numbers.type = bits, ir.TensorType(kind)
