"""Rules of operators that compute entry by entry, or along some axes alone."""

from dataclasses import replace

from ...engines.torch.onnx_graph import Node
from .found import Cut, total_of
from .repeated import less_often
from .spread import Seed, Spread, Whole
from .walk import SUMMED, Outputs, Walk, only


def each_alone(walk: Walk, node: Node) -> Outputs:
    """Of operators that compute entry by entry."""
    rank = len(walk.shape(node.outputs[0]))
    known = [
        spread.along(spread.axis + rank - len(walk.shape(name)))
        for name in node.inputs
        if (spread := walk.spread(name))
    ]
    first, seeds = known[0], walk.seeds(node)
    if any(
        (each.axis, each.blocks) != (first.axis, first.blocks) or not each.alike(first.parts, walk.shards)
        for each in known
    ):
        raise Whole(seeds, f"{node.op} joins what is spread in two ways")
    for name in filter(None, node.inputs):
        if walk.spread(name) is None:
            cut_along(walk, node, name, rank, first, seeds)
    return [replace(first, seeds=seeds)]


def cut_along(walk: Walk, node: Node, name: str, rank: int, spread: Spread, seeds: frozenset[Seed]) -> None:
    """Let a shard have that part of another operand which goes with its own."""
    shape = walk.shape(name)
    axis = spread.axis - (rank - len(shape))
    if axis < 0 or shape[axis] == 1:
        walk.demand(name, None, seeds)
    elif spread.blocks > 1:
        raise Whole(seeds, f"{name} is whole along what is folded")
    elif walk.is_constant(name):
        walk.demand(name, Cut(axis, spread.parts), seeds)
    elif walk.takes(name, axis, spread) or walk.has_share(name, axis, spread):
        return
    elif walk.repeats(name, axis):
        walk.found.firsts[node.outputs[0], node.inputs.index(name)] = axis, spread.share(walk.shards)
    elif walk.is_of_positions(name) and len(spread.parts) == 1:
        walk.found.shares[node.outputs[0], node.inputs.index(name)] = spread.along(axis)
    else:
        less = less_often(walk, name, shape[axis])
        raise less or walk.whole(name, seeds, f"{name} is whole along what is spread")


def gather_elements(walk: Walk, node: Node) -> Outputs:
    x, places = node.inputs
    spread, axis = walk.spread(x), node.attributes.get("axis", 0) % len(walk.shape(x))
    if spread is None or walk.spread(places) is not None or spread.axis == axis:
        raise Whole(walk.seeds(node), "GatherElements reads along what is spread")
    cut_along(walk, node, places, len(walk.shape(x)), spread, spread.seeds)
    return [spread]


def along_axis(walk: Walk, node: Node) -> Outputs:
    """Of operators that mix entries along one axis, which may not be spread."""
    spread, rank = only(walk, node), len(walk.shape(node.inputs[0]))
    if spread.axis == node.attributes.get("axis", -1) % rank:
        raise Whole(spread.seeds, f"{node.op} mixes what is spread")
    return [spread]


def norm(walk: Walk, node: Node) -> Outputs:
    spread, rank = only(walk, node), len(walk.shape(node.inputs[0]))
    last = node.attributes.get("axis", -1) % rank == spread.axis == rank - 1
    if last and node.op == "RMSNormalization" and not spread.twice(walk.shards):
        scale = node.inputs[1]
        walk.demand(scale, Cut(len(walk.shape(scale)) - 1, spread.parts), spread.seeds)
        walk.found.norms[node.outputs[0]] = walk.shape(node.inputs[0])[-1]
        return [spread]
    if spread.axis >= node.attributes.get("axis", -1) % rank:
        raise Whole(spread.seeds, f"{node.op} mixes what is spread")
    for name in filter(None, node.inputs[1:]):
        walk.demand(name, None, spread.seeds)
    return [spread, *[None] * (len(node.outputs) - 1)]


def reduce(walk: Walk, node: Node) -> Outputs:
    spread, rank = only(walk, node), len(walk.shape(node.inputs[0]))
    axes = {axis % rank for axis in walk.integers(node.inputs[1])}
    if spread.axis in axes:
        if node.op == "ReduceMax" or spread.twice(walk.shards) or spread.blocks > 1:
            raise Whole(spread.seeds, f"{node.op} mixes what is spread")
        [name] = node.outputs
        if node.op == "ReduceMean":
            walk.found.means.append(name)
            name = total_of(name)
        walk.found.sums.append(name)
        return [SUMMED]
    if node.attributes.get("keepdims", 1):
        return [spread]
    return [spread.along(spread.axis - sum(axis < spread.axis for axis in axes))]
