"""Rules of what has heads: attention, its cache, and the positions of its tokens."""

from ...engines.torch.onnx_graph import Node
from .found import Cut
from .spread import InUnits, Part, Spread, Whole
from .walk import Outputs, Walk


def rotary(walk: Walk, node: Node) -> Outputs:
    spread = walk.spread(node.inputs[0])
    if spread is None or spread.axis != 1 or any(walk.spread(name) for name in node.inputs[1:]):
        raise Whole(walk.seeds(node), "RotaryEmbedding turns heads")
    if node.attributes.get("num_heads"):
        walk.found.heads[node.outputs[0]] = spread.share(walk.shards)
    return [spread]


def scatter_entries(walk: Walk, node: Node) -> Outputs:
    """Of what writes the cache: it holds what is written."""
    past, rows, _ = node.inputs
    spread = walk.spread(rows)
    if spread is None or spread.axis == 2:
        raise Whole(walk.seeds(node), "the cache is spread by heads alone")
    if spread.axis == 3 and walk.shape(rows)[1] == 1 and past in walk.keys:
        raise InUnits(spread.seeds, 1)  # every shard has the only head
    walk.found.spreads[past] = spread
    return [spread]


def attention(walk: Walk, node: Node) -> Outputs:
    query, key, value, *mask = node.inputs
    seeds = walk.seeds(node)
    spread, read = walk.spread(query), [walk.spread(name) for name in (key, value)]
    if spread is None or spread.axis != 1 or len(spread.parts) != 1 or spread.twice(walk.shards):
        raise walk.whole(query, seeds, "queries are spread by heads alone")
    heads = walk.shape(query)[1]
    for name, one in zip((key, value), read, strict=True):
        kept = walk.shape(name)[1]
        if one is None and (kept == 1 or walk.takes(name, 1, Spread(1, (Part(kept, kept),), seeds))):
            continue  # an only head, or what an encoder gives
        if one is not None and one.axis != 1:
            raise Whole(one.seeds, "keys and values are spread by heads alone")
        if one is None or not one.alike((Part(kept, kept),), walk.shards) or heads % kept:
            raise walk.whole(name, seeds, "keys and values are spread in another way than queries")
    for place, name in enumerate(mask, 3):
        if name and walk.spread(name) is None and len(walk.shape(name)) == 4 and walk.shape(name)[1] != 1:
            if walk.is_constant(name):
                walk.demand(name, Cut(1, spread.parts), seeds)
            else:
                walk.found.shares[node.outputs[0], place] = spread
    walk.found.heads_of_queries = max(walk.found.heads_of_queries, spread.share(walk.shards))
    return [Spread(1, spread.parts, seeds), *[None] * (len(node.outputs) - 1)]
