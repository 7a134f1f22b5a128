"""Decompose a traced program operator by operator: torch traces it anew for that, which takes half an export's time."""

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from .out_of_place import write_nothing_in_place
from .swapping import swapped

Table = Mapping[Any, Callable[..., Any]]

# Asked of a tensor within an operator: a trace of the whole knows the answer, or gets it from the inputs.
ASKED = {
    torch.ops.aten.sym_size.int,
    torch.ops.aten.sym_numel.default,
    torch.ops.aten.sym_stride.int,
    torch.ops.aten.sym_storage_offset.default,
}


@contextmanager
def decomposed_in_place() -> Iterator[None]:
    """Let `run_decompositions` trace anew only what takes more than one operator to decompose."""
    trace_anew: Callable[[ExportedProgram, Table], ExportedProgram] = ExportedProgram.run_decompositions

    def run_decompositions(program: ExportedProgram, table: Table) -> ExportedProgram:
        graph = program.graph
        write_nothing_in_place(graph)
        if not all(map(_stands_alone, graph.nodes)):
            return trace_anew(program, table)
        parts = {}
        for node in filter(partial(_is_composed, table=table), graph.nodes):
            parts[node] = _parts(node, table)
            if any(part.target in ASKED for part in parts[node].nodes):
                return trace_anew(program, table)
        for node, made in parts.items():
            for old, new in _put_in_place(graph, node, made):
                program.graph_signature.replace_all_uses(old, new)
        return program

    with swapped(ExportedProgram, run_decompositions=run_decompositions):
        yield


def _stands_alone(node: Node) -> bool:
    """Say whether a node neither writes to its inputs, which others may see, nor calls a graph of its own."""
    if isinstance(node.target, torch._ops.OpOverload):
        return not node.target._schema.is_mutable
    return node.op != "get_attr" and not isinstance(node.target, torch._ops.HigherOrderOperator)


def _is_composed(node: Node, table: Table) -> bool:
    """Say whether torch decomposes it: what the table has, and composites that may be a view of their input."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    views = any(argument.alias_info for argument in target._schema.arguments)
    composite = target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return target in table or (views and composite)


def _parts(node: Node, table: Table) -> Graph:
    """Trace what a node is made of, as a graph of its input nodes."""
    target: Any = node.target
    leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
    inputs = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, Node)}

    def call(*values: Any) -> Any:
        given = dict(enumerate(leaves)) | dict(zip(inputs, values, strict=True))
        args, kwargs = pytree.tree_unflatten(given.values(), structure)
        return target(*args, **kwargs)

    parts = make_fx(call, dict(table))(*(value.meta["val"] for value in inputs.values())).graph
    for part in parts.nodes:
        part.meta = node.meta | part.meta
    return parts


def _put_in_place(graph: Graph, node: Node, parts: Graph) -> Iterator[tuple[str, str]]:
    """Replace a node, and give the names of its results before and after."""
    inputs = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, Node)]
    placeholders = [part for part in parts.nodes if part.op == "placeholder"]
    with graph.inserting_before(node):
        made: Any = graph.graph_copy(parts, dict(zip(placeholders, inputs, strict=True)))
    results = {node: made}
    if not isinstance(made, Node):
        results = {user: made[user.args[1]] for user in list(node.users) if user.target is operator.getitem}
    for old, new in results.items():
        old.replace_all_uses_with(new)
        if old is not node:
            graph.erase_node(old)
        yield old.name, new.name
    graph.erase_node(node)
