"""Root-mean-square norms: with the casts around them, and with the residual that is added before or after."""

from ...onnx_types import dtype_of
from ..onnx_graph import Node
from .rewriting import Rewriting, fused


def fuse(graph: Rewriting) -> int:
    """Return how many norms were found, each of which is one kernel at most afterwards."""
    alone = [_with_casts(graph, node) for node in graph.all("RMSNormalization")]
    for add in graph.all("Add"):
        _with_residual(graph, add)
    return sum(node is not None for node in alone)


def _with_casts(graph: Rewriting, node: Node) -> Node | None:
    scale = graph.constants.get(node.inputs[1])
    if (
        scale is None
        or scale.dim() != 1
        or not graph.understood(node, "axis", "epsilon")
        or node.attributes.get("axis", -1) != -1
    ):
        return None
    x, dtype, old, output = node.inputs[0], scale.dtype, [node], node.outputs
    before, after = graph.maker(x, "Cast"), graph.only_reader(output[0], "Cast")
    if before and dtype_of(before.attributes["to"]) == dtype:
        x = before.inputs[0]
        old += [before] if graph.only_reader(before.outputs[0]) is node else []
    if after and dtype_of(after.attributes["to"]).is_floating_point:
        dtype, output = dtype_of(after.attributes["to"]), after.outputs
        old.append(after)
    epsilon, turned, places = node.attributes.get("epsilon", 1e-5), graph.maker(x, "Transpose"), list[int]()
    if turned and graph.only_reader(x) in old:
        places = turned.attributes["perm"]
    if turned and places and places[-1] == len(places) - 1:  # a kernel reads rows, which a turned tensor has not
        unturned = f"{output[0]}.unturned"
        new = fused("Norm", [turned.inputs[0], node.inputs[1]], [unturned], epsilon=epsilon, dtype=dtype)
        graph.replace([*old, turned], new, Node(turned.name, "Transpose", (unturned,), output, turned.attributes))
        return new
    new = fused("Norm", [x, node.inputs[1]], output, epsilon=epsilon, dtype=dtype)
    graph.replace(old, new)
    return new


def _with_residual(graph: Rewriting, add: Node) -> None:
    if any(value in graph.constants for value in add.inputs):
        return
    total = add.outputs[0]
    last = next((node for node in graph.readers(total) if node.op == "trt_spec::Norm"), None)
    residual, x, first = _normed_part(graph, add)
    if last is None and first is None:
        return
    old = [node for node in (add, first, last) if node]
    if last is None:
        assert first is not None
        graph.replace(old, fused("NormAdd", [residual, x, first.inputs[1]], [total], **first.attributes))
        return
    before = {f"first_{name}": first.attributes[name] for name in ("epsilon", "dtype")} if first else {}
    inputs = [residual, x, last.inputs[1], first.inputs[1] if first else ""]
    graph.replace(old, fused("AddNorm", inputs, [total, last.outputs[0]], **last.attributes, **before))


def _normed_part(graph: Rewriting, add: Node) -> tuple[str, str, Node | None]:
    """Return the residual, what is added to it, and the norm of the latter that nobody else reads, if there is one."""
    for residual, x in (add.inputs, add.inputs[::-1]):
        norm = graph.maker(x, "trt_spec::Norm")
        if norm and residual != x and graph.only_reader(x) is add:
            return residual, norm.inputs[0], norm
    return add.inputs[0], add.inputs[1], None
