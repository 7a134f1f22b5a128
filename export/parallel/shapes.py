"""Rules of operators that give entries other places."""

from collections.abc import Sequence
from itertools import pairwise

from ...engines.torch.onnx_graph import Node
from .alone import cut_along
from .spread import InParts, Part, Respread, Seed, Spread, Whole, reshaped
from .walk import Outputs, Walk, only


def reshape(walk: Walk, node: Node) -> Outputs:
    [name], [out] = node.inputs[:1], node.outputs
    spread = walk.spread(name)
    assert spread is not None
    made = reshaped(spread, walk.shape(name), walk.shape(out), walk.shards)
    walk.sized(node, 1, {made.axis: made.share(walk.shards)}, spread.seeds)
    if made.blocks > 1 and (out, 1) in walk.found.numbers:  # it depends on how many rows there are
        raise Whole(spread.seeds, f"the folded size of {out} is said, and not left open")
    return [made]


def transpose(walk: Walk, node: Node) -> Outputs:
    spread = only(walk, node)
    return [spread.along(node.attributes["perm"].index(spread.axis))]


def unsqueeze(walk: Walk, node: Node) -> Outputs:
    spread, rank = only(walk, node), len(walk.shape(node.outputs[0]))
    new = {axis % rank for axis in walk.integers(node.inputs[1])}
    left = [axis for axis in range(rank) if axis not in new]
    return [spread.along(left[spread.axis])]


def squeeze(walk: Walk, node: Node) -> Outputs:
    spread, rank = only(walk, node), len(walk.shape(node.inputs[0]))
    gone = {axis % rank for axis in walk.integers(node.inputs[1])}
    return [spread.along(spread.axis - sum(axis < spread.axis for axis in gone))]


def concat(walk: Walk, node: Node) -> Outputs:
    seeds, rank = walk.seeds(node), len(walk.shape(node.outputs[0]))
    axis = node.attributes["axis"] % rank
    known = [walk.spread(name) for name in node.inputs]
    first = next(one for one in known if one is not None)
    if first.axis != axis:
        if any(one and (one.axis != first.axis or not one.alike(first.parts, walk.shards)) for one in known):
            raise Whole(seeds, "Concat joins what is spread in two ways")
        for name in node.inputs:
            if walk.spread(name) is None:
                cut_along(walk, node, name, rank, first, seeds)
        return [Spread(first.axis, first.parts, seeds)]
    for name, one in zip(node.inputs, known, strict=True):
        if one is None or one.axis != axis:
            raise walk.whole(name, seeds, "Concat appends what is whole")
    return [Spread(axis, tuple(part for one in known if one for part in one.parts), seeds)]


def split(walk: Walk, node: Node) -> Outputs:
    spread = only(walk, node)
    axis = node.attributes.get("axis", 0) % len(walk.shape(node.inputs[0]))
    if axis != spread.axis:
        return [spread] * len(node.outputs)
    sizes, parts, made = [walk.shape(name)[axis] for name in node.outputs], list(spread.parts), []
    for size in sizes:
        taken: list[Part] = []
        while parts and sum(part.size for part in taken) < size:
            taken.append(parts.pop(0))
        if sum(part.size for part in taken) != size:
            raise InParts(spread.seeds, sizes)
        made.append(taken)
    held = [sum(part.share(walk.shards) for part in taken) for taken in made]
    if len(node.inputs) > 1 and node.inputs[1]:
        walk.sized(node, 1, dict(enumerate(held)), spread.seeds)
    elif any(size != -(-sum(held) // len(held)) for size in held[:-1]):
        raise Whole(spread.seeds, "Split makes pieces of one size")
    each = _seeds_of_parts(spread)
    first = 0
    outputs: list[Spread | None] = []
    for taken in made:
        seeds = frozenset[Seed]().union(*each[first : first + len(taken)]) if each else spread.seeds
        outputs.append(Spread(axis, tuple(taken), seeds))
        first += len(taken)
    return outputs


def _seeds_of_parts(spread: Spread) -> list[frozenset[Seed]]:
    """Return the seeds of each part, where every part has one of a single matrix."""
    kinds = {kind for kind, _ in spread.seeds}
    if len(kinds) != 1 or len(spread.seeds) != len(spread.parts):
        return []
    return [frozenset([seed]) for seed in sorted(spread.seeds)]


def slices(walk: Walk, node: Node) -> Outputs:
    spread, rank = only(walk, node), len(walk.shape(node.inputs[0]))
    axes = [axis % rank for axis in walk.integers(node.inputs[3])]
    if spread.axis not in axes:
        return [spread]
    place, size = axes.index(spread.axis), walk.shape(node.inputs[0])[spread.axis]
    if len(node.inputs) > 4 and (every := walk.integers(node.inputs[4])[place]) != 1:
        return _every(walk, node, spread, place, every)
    starts, ends = (walk.integers(name)[place] for name in node.inputs[1:3])
    start, end = (max(0, min(size, at + size if at < 0 else at)) for at in (starts, ends))
    if (start, end) == (0, size):
        return [spread]
    begins = [sum(part.size for part in spread.parts[:at]) for at in range(len(spread.parts))]
    inside = [at for at, begin in enumerate(begins) if start <= begin and begin + spread.parts[at].size <= end]
    if sum(spread.parts[at].size for at in inside) != end - start:
        raise _finer(spread, begins, (start, end))
    before = sum(part.share(walk.shards) for part in spread.parts[: inside[0]])
    held = sum(spread.parts[at].share(walk.shards) for at in inside)
    walk.found.numbers[node.outputs[0], 1] = {place: before}
    walk.found.numbers[node.outputs[0], 2] = {place: before + held}
    each = _seeds_of_parts(spread)
    seeds = frozenset(seed for at in inside for seed in each[at]) if each else spread.seeds
    return [Spread(spread.axis, tuple(spread.parts[at] for at in inside), seeds)]


def _finer(spread: Spread, begins: Sequence[int], bounds: Sequence[int]) -> Respread:
    """Ask for the first part that is cut at one of these bounds to be spread in several."""
    for begin, part, seeds in zip(begins, spread.parts, _seeds_of_parts(spread), strict=False):
        inner = [bound - begin for bound in bounds if begin < bound < begin + part.size]
        if inner:
            return InParts(seeds, [b - a for a, b in pairwise([0, *sorted(set(inner)), part.size])])
    return Whole(spread.seeds, f"it is cut at {list(bounds)}")


def _every(walk: Walk, node: Node, spread: Spread, place: int, every: int) -> Outputs:
    """Of a slice that takes every second entry, or so, to the end."""
    start, end = (walk.integers(name)[place] for name in node.inputs[1:3])
    whole, size = walk.shape(node.inputs[0])[spread.axis], walk.shape(node.outputs[0])[spread.axis]
    in_shares = len(spread.parts) == 1 and spread.share(walk.shards) % every == 0 and not spread.twice(walk.shards)
    if not (in_shares and 0 <= start < every and end >= whole):
        raise Whole(spread.seeds, f"every {every}th entry is taken of what is spread")
    return [Spread(spread.axis, (Part(size, size),), spread.seeds)]
