"""What is repeated along an axis: where all heads read one group, a shard repeats it for its own heads alone."""

from ...engines.torch.onnx_graph import Node
from .spread import InUnits, Part, Repeated, Respread, Seed, Spread
from .walk import Outputs, Walk


def expand(walk: Walk, node: Node) -> Outputs:
    [name], [out], seed = node.inputs[:1], node.outputs, _seed(walk, node)
    before, after = walk.shape(name), walk.shape(out)
    spread = walk.spread(name)
    if spread is not None and walk.kinds.get(seed[0]):
        raise InUnits(spread.seeds, 1)  # every shard has the only group
    if spread is not None:
        made = spread.along(spread.axis + len(after) - len(before))
    elif parts := walk.kinds.get(seed[0]):
        walk.read_whole(node)
        made = Spread(_grown(walk, node, parts[0].size)[0], parts, frozenset([seed]))
    else:
        walk.read_whole(node)
        return [None]
    asked = walk.integers(node.inputs[1])
    place = made.axis - (len(after) - len(asked))
    if place >= 0 and asked[place] != 1:
        walk.sized(node, 1, {place: made.share(walk.shards)}, made.seeds)
    return [made]


def less_often(walk: Walk, name: str, size: int) -> Respread | None:
    """Ask that what a whole value is made of be repeated for a shard's heads alone, where it is repeated so often."""
    seeds, left, seen = set[Seed](), [name], set[str]()
    while left:
        node = walk.maker.get(value := left.pop())
        if node is None or value in seen or walk.number(value) is not None:
            continue
        seen.add(value)
        if node.op == "Expand" and _grown(walk, node, size):
            seeds.add(_seed(walk, node))
        elif node.op not in ("Gather", "Gemm") and not (node.op == "MatMul" and walk.is_constant(node.inputs[1])):
            left += filter(None, node.inputs)
    new = frozenset(seed for seed in seeds if seed[0] not in walk.kinds)
    return Repeated(new, Part(size, size)) if new and Part(size, size).fits(walk.shards) else None


def _grown(walk: Walk, node: Node, size: int) -> list[int]:
    """Return the axes along which an Expand repeats so often what has one entry."""
    before, after = walk.shape(node.inputs[0]), walk.shape(node.outputs[0])
    before = (1,) * (len(after) - len(before)) + before
    return [axis for axis, both in enumerate(zip(before, after, strict=True)) if both == (1, size)]


def _seed(walk: Walk, node: Node) -> Seed:
    return f"Expand {walk.kind(node.outputs[0])}", 0
