"""Rules of products: columns of a matrix are spread, and sums over what is spread are made between shards."""

from ...engines.torch.onnx_graph import Node
from .found import ALONE, Cut
from .repeated import less_often
from .spread import Spread, Whole
from .walk import SUMMED, Outputs, Walk


def matmul(walk: Walk, node: Node) -> Outputs:
    x, y = node.inputs
    if walk.is_constant(y):
        return _by_matrix(walk, node, x, y)
    return _of_two(walk, node, x, y)


def _by_matrix(walk: Walk, node: Node, x: str, y: str) -> Outputs:
    spread, shape, out = walk.spread(x), walk.shape(y), len(walk.shape(node.outputs[0]))
    given = len(walk.shape(x))
    if spread is None:
        return _spread_columns(walk, y, len(shape) - 1, out - 1)
    if spread.axis == given - 1:
        return _sum_over(walk, node, spread, y, len(shape) - 2)
    axis = spread.axis - (given - len(shape))  # of the matrices, if there are several
    if spread.axis < given - 2 and axis >= 0 and shape[axis] != 1:
        walk.demand(y, Cut(axis, spread.parts), spread.seeds)
    else:
        walk.demand(y, None, spread.seeds)
    return [spread.along(spread.axis + max(0, out - given))]  # a row of numbers takes the last axis alone


def _spread_columns(walk: Walk, matrix: str, axis: int, last: int) -> Outputs:
    size = walk.shape(matrix)[axis]
    if len(walk.shape(matrix)) < 2 or (parts := walk.columns(matrix, size)) is None:
        walk.demand(matrix, None, frozenset())
        return [None]
    seeds = frozenset((walk.kind(matrix), place) for place in range(len(parts)))
    walk.demand(matrix, Cut(axis, parts), seeds)
    return [Spread(last, parts, seeds)]


def _sum_over(walk: Walk, node: Node, spread: Spread, matrix: str, axis: int) -> Outputs:
    if spread.twice(walk.shards):
        raise Whole(spread.seeds, "a sum would count what several shards have")
    walk.demand(matrix, Cut(axis, spread.parts), spread.seeds)
    walk.found.sums.append(node.outputs[0])
    return [SUMMED]


def _of_two(walk: Walk, node: Node, x: str, y: str) -> Outputs:
    left, right, out = walk.spread(x), walk.spread(y), len(walk.shape(node.outputs[0]))
    if left is None and right is None:
        walk.read_whole(node)
        return [None]
    seeds, ranks = walk.seeds(node), (len(walk.shape(x)), len(walk.shape(y)))
    summed = [None if one is None else one.axis - rank for one, rank in zip((left, right), ranks, strict=True)]
    if left is not None and right is not None and summed == [-1, -2] and left.alike(right.parts, walk.shards):
        if left.twice(walk.shards):
            raise Whole(seeds, "a sum would count what several shards have")
        walk.found.sums.append(node.outputs[0])
        return [SUMMED]
    if summed[0] == -1 or summed[1] == -2:
        raise Whole(seeds, "one factor of a sum is spread alone")
    if (summed[0] == -2 and right is None) or (summed[1] == -1 and left is None):
        spread = left or right
        assert spread is not None
        return [spread.along(out - 2 if left else out - 1)]
    return each_of_batch(walk, node, out)


def each_of_batch(walk: Walk, node: Node, out: int) -> Outputs:
    seeds = walk.seeds(node)
    known = [(name, spread) for name in node.inputs if (spread := walk.spread(name))]
    axes = {spread.axis - len(walk.shape(name)) for name, spread in known}
    parts = known[0][1].parts
    if len(axes) != 1 or max(axes) >= -2 or not all(spread.alike(parts, walk.shards) for _, spread in known):
        raise Whole(seeds, "factors are spread in two ways")
    [axis] = axes
    for name in node.inputs:
        rank = len(walk.shape(name))
        whole = walk.spread(name) is None and rank >= -axis and walk.shape(name)[axis] != 1
        if whole and not walk.takes(name, rank + axis, known[0][1]):
            less = less_often(walk, name, walk.shape(name)[axis])
            raise less or walk.whole(name, seeds, f"{name} is whole along what is spread")
    return [Spread(out + axis, parts, seeds)]


def gemm(walk: Walk, node: Node) -> Outputs:
    x, matrix, *bias = node.inputs
    spread, turned = walk.spread(x), node.attributes.get("transB", 0)
    if not walk.is_constant(matrix):
        if seeds := walk.seeds(node):
            raise Whole(seeds, "a Gemm of two values")
        walk.read_whole(node)
        return [None]
    if spread is not None and spread.axis == 1:
        for name in filter(None, bias):
            walk.demand(name, ALONE, spread.seeds)
        return _sum_over(walk, node, spread, matrix, 1 if turned else 0)
    if spread is not None:
        for name in (matrix, *filter(None, bias)):
            walk.demand(name, None, spread.seeds)
        return [spread]
    made = _spread_columns(walk, matrix, 0 if turned else 1, 1)
    for name in filter(None, bias):
        cut = None if made[0] is None else Cut(len(walk.shape(name)) - 1, made[0].parts)
        walk.demand(name, cut, frozenset() if made[0] is None else made[0].seeds)
    return made


def convolution(walk: Walk, node: Node) -> Outputs:
    spread, channels = walk.spread(node.inputs[0]), walk.shape(node.inputs[0])[1]
    if spread is None or spread.axis != 1 or node.attributes.get("group", 1) != channels:
        raise Whole(walk.seeds(node), "a convolution mixes channels")
    for name in filter(None, node.inputs[1:]):
        walk.demand(name, Cut(0, spread.parts), spread.seeds)
    walk.found.groups[node.outputs[0]] = spread.share(walk.shards)
    return [spread]


def gather(walk: Walk, node: Node) -> Outputs:
    table, places = node.inputs
    spread, axis = walk.spread(table), node.attributes.get("axis", 0)
    if walk.spread(places) is not None:
        raise Whole(walk.seeds(node), "places are spread")
    if spread is not None:
        rank = len(walk.shape(table))
        if spread.axis == axis % rank:
            raise Whole(spread.seeds, "Gather reads along what is spread")
        more = len(walk.shape(places)) - 1
        return [spread.along(spread.axis + (more if spread.axis > axis % rank else 0))]
    shape = walk.shape(table)
    of_tokens = table in walk.tables and walk.is_float(table) and len(shape) == 2 and shape[0] == walk.rows
    if (
        of_tokens
        and axis == 0
        and (parts := walk.columns(table, -(-shape[0] // walk.shards) * walk.shards)) is not None
    ):
        walk.demand(table, Cut(0, parts), frozenset([(walk.kind(table), 0)]), padded=True)
        walk.found.lookups[node.outputs[0]] = parts[0].share(walk.shards)
        walk.found.sums.append(node.outputs[0])
        return [SUMMED]
    walk.read_whole(node)
    return [None]
