"""Store the weight of every linear layer the way MatMul reads it, so that no graph transposes a constant."""

import onnx_ir as ir
import torch


def orient_weights(model: ir.Model) -> int:
    """Replace `Transpose(weight)` by a weight of that orientation; its bytes are turned only when written.

    A tied embedding stays as it is for the lookup and the vocabulary projection gets its own copy, which `quantise`
    takes or `share_table` takes back: a Transpose of the embedding would be no constant to the engines, which fold it
    at load or refuse to quantise it.
    """
    graph = model.graph
    fired = 0
    for node in list(graph):
        weight = node.inputs[0] if node.op_type == "Transpose" else None
        if weight is None or weight.name is None or weight.name not in graph.initializers:
            continue
        if node.attributes.get_ints("perm") != (1, 0):
            continue
        oriented = f"{weight.name}.T"
        if oriented not in graph.initializers:
            graph.register_initializer(_transposed(weight, oriented))
        node.outputs[0].replace_all_uses_with(graph.initializers[oriented])
        graph.remove(node, safe=True)
        if not weight.uses():
            del graph.initializers[weight.name]
        fired += 1
    return fired


def _transposed(weight: ir.Value, name: str) -> ir.Value:
    source = getattr(weight.const_value, "raw", None)
    assert isinstance(source, torch.Tensor), f"{weight.name} is not backed by the checkpoint"
    view = ir.tensor_adapters.TorchTensor(source.detach().T, name=name)  # a view: no memory until it is written
    return ir.Value(name=name, shape=view.shape, type=ir.TensorType(view.dtype), const_value=view)
