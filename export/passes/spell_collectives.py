"""Write what is between shards as TensorRT's own operator for it, which its parser alone knows.

TensorRT sums and gathers among all that share the communicator of a context.
"""

import onnx_ir as ir

from .nodes import Nodes

DOMAIN = "trt_spec"  # of the operators that a graph in shards has


def spell_collectives(model: ir.Model) -> int:
    """Write sums, and gatherings along the last axis, which TensorRT makes along the first; returns how many."""
    nodes = [node for node in model.graph if node.domain == DOMAIN]
    for node in nodes:
        x, made = node.inputs[0], node.outputs[0]
        assert x is not None
        op = Nodes(model.graph)
        if node.op_type == "AllReduce":
            found = _collective(op, x, made, collective_operation="all_reduce", reduce_op="sum")
        else:
            count = node.attributes.get_int("shards")
            parts = _collective(op, x, made, collective_operation="all_gather", reduce_op="none", nb_rank=count)
            shards = op.stored([count])
            apart = op("Reshape", parts, op("Concat", shards, op("Shape", x), axis=0))  # [shards, B, R, V]
            size = op("Concat", op("Shape", x, end=2), op("Mul", op("Shape", x, start=2), shards), axis=0)
            found = op("Reshape", op("Transpose", apart, perm=[1, 2, 0, 3]), size)
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], op.made, [made], [found])
    return len(nodes)


def _collective(op: Nodes, x: ir.Value, like: ir.Value, **settings: int | str) -> ir.Value:
    everybody = ir.AttrInt64s("groups", [])
    made = op("DistCollective", x, **settings, root=-1, group_size=0, groups=everybody)
    made.type = like.type
    return made
