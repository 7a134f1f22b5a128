"""Cuts the operations of a step into regions: layers that are alike become regions of one form."""

import operator
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from .conversion import VALUE

LEAST_SAVED = 1 / 8  # of all operations; fewer are not worth what it costs to go from one region to the next
METHODS = (type(torch.Tensor.reshape), type(torch.Tensor.__getitem__))


class Region(NamedTuple):
    """Neighbouring operations; all that they read of others, weights too, is given to them."""

    module: fx.GraphModule
    reads: tuple[fx.Node, ...]
    makes: tuple[fx.Node, ...]  # what others read


def regions(graph: fx.Graph) -> list[Region]:
    """Return the regions of a graph in their order: what comes before its layers, each of them, and what follows."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    inner = repeats([_token(node) for node in nodes], _crossing(nodes))
    cuts = sorted({0, *(_after_parts(nodes, cut) for cut in inner), len(nodes)})
    return [_region(nodes[begin:end]) for begin, end in pairwise(cuts)]


def repeats(tokens: Sequence[object], crossing: Sequence[int]) -> list[int]:
    """Return where the repetitions begin that save most of a sequence, and where the last ends; nothing if none do.

    Of several places that save as much, it cuts where the fewest values cross.
    """
    numbers: dict[object, int] = {}
    found = np.array([numbers.setdefault(token, len(numbers)) for token in tokens])
    begin, period, again, slack, saved = 0, 0, 0, 0, int(LEAST_SAVED * len(found))
    for length in range(1, len(found) // 2 + 1):
        same = np.concatenate([[False], found[length:] == found[:-length], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1]).reshape(-1, 2)
        first, end = max(edges.tolist(), key=lambda edge: edge[1] - edge[0], default=(0, 0))
        if (end - first) // length * length > saved:
            begin, period, (again, slack) = first, length, divmod(end - first, length)
            saved = again * period
    if not again:
        return []
    begin = min(range(begin, begin + slack + 1), key=lambda cut: crossing[cut + period])
    return [begin + turn * period for turn in range(again + 2)]


def _after_parts(nodes: Sequence[fx.Node], cut: int) -> int:
    """Move a cut after the parts of a tuple: only tensors go from one region to the next."""
    while cut < len(nodes) and nodes[cut].target is operator.getitem:
        cut += 1
    return cut


def _crossing(nodes: Sequence[fx.Node]) -> list[int]:
    """Return for each place between the nodes how many values are made before it and read after it."""
    places = {node: place for place, node in enumerate(nodes)}
    changes = [0] * (len(nodes) + 2)
    for node, place in places.items():
        changes[place + 1] += 1
        changes[max((places[user] for user in node.users if user in places), default=place) + 1] -= 1
    return list(accumulate(changes))


def _token(node: fx.Node) -> object:
    """Return what is equal for operations that may be alike."""
    return str(node.target), str(map_arg((node.args, node.kwargs), lambda one: str(_described(one))))


def _described(node: fx.Node) -> object:
    value = node.meta.get(VALUE)
    return (tuple(value.shape), str(value.dtype), value.stride()) if isinstance(value, Tensor) else None


def _region(nodes: Sequence[fx.Node]) -> Region:
    graph, own = fx.Graph(), dict[fx.Node, fx.Node]()
    inside = set(nodes)
    reads = dict.fromkeys(one for node in nodes for one in node.all_input_nodes if one not in inside)
    for number, node in enumerate(reads):
        own[node] = graph.placeholder(f"given_{number}")
    for number, node in enumerate(nodes):
        args, kwargs = map_arg((node.args, node.kwargs), own.__getitem__)
        operation, target = node.op, node.target
        if isinstance(target, METHODS):  # torch's cache knows them by name alone
            operation, target = "call_method", target.__name__
        own[node] = graph.create_node(operation, target, args, kwargs, name=f"made_{number}")
    for node, one in own.items():
        one.meta |= node.meta
    makes = tuple(node for node in nodes if any(user not in inside and user.op != "output" for user in node.users))
    graph.output(tuple(own[node] for node in makes))
    return Region(fx.GraphModule({}, graph), tuple(reads), makes)
