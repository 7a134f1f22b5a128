"""Lets a traced program make a new value where it writes to one that nothing else sees, as routers do to their weights.

A program that writes to its values has to be traced a second time.
"""

import operator
from typing import Any

import torch
from torch.fx import Graph, Node


def write_nothing_in_place(graph: Graph) -> None:
    """Replace the writes of which that can be said; others stay."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        anew = _anew(node)
        if anew is None:
            continue
        written: Any = node.args[0]
        earlier = [user for user in written.users if order[user] < order[node]]
        if not _is_fresh(written) or any(map(_may_alias, earlier)):
            continue
        node.target = anew
        for user in list(written.users):
            if order[user] > order[node]:
                user.replace_input_with(written, node)


def _anew(node: Node) -> Any:
    """Return the operator that makes what this one writes to its first argument, which alone it changes."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return None
    name, overload = target._schema.name.removeprefix("aten::"), target._overloadname
    first, *others = target._schema.arguments
    if not name.endswith("_") or first.alias_info is None or any(one.alias_info for one in others):
        return None
    values = [one.meta["val"] for one in node.args if isinstance(one, Node)]
    if len({value.dtype for value in values if isinstance(value, torch.Tensor)}) != 1:
        return None  # the new value might have another type
    return getattr(getattr(torch.ops.aten, name[:-1], None), overload, None)


def _is_fresh(value: Node) -> bool:
    """Say whether an operator has made a value of its own."""
    source: Any = value.args[0] if value.target is operator.getitem else value
    return isinstance(source.target, torch._ops.OpOverload) and not _may_alias(source)


def _may_alias(node: Node) -> bool:
    """Say whether a node may give a view of what it reads."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    composite = target.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return composite or any(one.alias_info for one in (*target._schema.arguments, *target._schema.returns))
