"""A call's keys and values: normed, rotated and written into the cache by one operator, with the queries.

Keys and values that nobody rotates are written by one as well, and other tensors rotated.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..onnx_graph import Node
from .rewriting import Rewriting, fused

TURNED = [0, 2, 1, 3]  # from heads of tokens to tokens of heads
TO_THE_END = 1 << 31  # of any axis


@dataclass(frozen=True)
class _Rotation:
    """How a tensor of heads is made: rotated, and perhaps normed before."""

    source: str  # [B, heads, S, D], or [B, S, heads, D] if it is still to be turned
    turn: bool
    angles: tuple[str, ...]  # cosines and sines
    numbers: int  # of each head that are rotated; 0 for all
    scale: str
    epsilon: float
    dtype: torch.dtype | None  # of what the norm gives; None without one
    old: Sequence[Node]


def fuse(graph: Rewriting) -> int:
    """Return how many writes and rotations there were; those of one layer are one operator now."""
    found = [node for op in ("TensorScatter", "RotaryEmbedding") for node in graph.all(op)]
    for attention in graph.all("Attention"):
        _write(graph, attention)
    for node in graph.all("RotaryEmbedding"):
        _rotate(graph, node)
    return len(found) - sum(1 for op in ("TensorScatter", "RotaryEmbedding") for _ in graph.all(op))


def _write(graph: Rewriting, attention: Node) -> None:
    """Join the writes of the keys and values that this attention reads, unless another's did."""
    query, *presents = attention.inputs[:3]
    writes = [graph.maker(value, "TensorScatter") for value in presents]
    keys, values = writes
    if keys is None or values is None or keys is values or keys.inputs[2] != values.inputs[2]:
        return
    if any(node.attributes.get("axis", -2) not in (2, -2) for node in (keys, values)):
        return
    start, past = keys.inputs[2], [keys.inputs[0], values.inputs[0]]
    alone = graph.only_reader(keys.inputs[1]) is keys
    own, queries = _rotation(graph, keys.inputs[1]) if alone else None, _rotation(graph, query)
    if own is None or queries is None or (own.angles, own.numbers) != (queries.angles, queries.numbers):
        new = fused("Write", [keys.inputs[1], values.inputs[1], start, *past], presents)
        graph.replace([keys, values], new)
        return
    rotated = [_turned(graph, queries), _turned(graph, own), values.inputs[1], *own.angles]
    new = fused(
        "RotateWrite",
        [*rotated, start, *past, queries.scale, own.scale],
        [query, *presents],
        query_epsilon=queries.epsilon,
        key_epsilon=own.epsilon,
        query_dtype=queries.dtype,
        key_dtype=own.dtype,
        numbers=own.numbers,
    )
    graph.replace([keys, values, *own.old, *queries.old], new)


def _rotate(graph: Rewriting, node: Node) -> None:
    joined = graph.only_reader(node.outputs[0], "Concat")
    for value in (joined.outputs[0] if joined else "", node.outputs[0]):
        if found := _rotation(graph, value):
            inputs = [_turned(graph, found), *found.angles, found.scale]
            attributes = {"epsilon": found.epsilon, "numbers": found.numbers, "dtype": found.dtype}
            new = fused("Rotate", inputs, [value], **attributes)
            graph.replace(found.old, new)
            return


def _turned(graph: Rewriting, rotation: _Rotation) -> str:
    """Return the tensor as [B, heads, S, D]."""
    if not rotation.turn:
        return rotation.source
    output = f"{rotation.source}.turned"
    graph.replace([], Node(output, "Transpose", (rotation.source,), (output,), {"perm": TURNED}))
    return output


def _rotation(graph: Rewriting, value: str) -> _Rotation | None:
    """Find the rotation that makes this value, of whole heads or of the first numbers of each."""
    rotary, join = graph.maker(value, "RotaryEmbedding"), graph.maker(value, "Concat")
    if rotary:
        x, numbers, old = rotary.inputs[0], 0, [rotary]
    elif join and (part := _first_part(graph, join)):
        rotary, x, numbers, old = part
    else:
        return None
    if not graph.understood(rotary):
        return None
    angles = rotary.inputs[1:3]
    readers = {id(node) for node in old}
    source, norm, turn, above = x, None, False, list[Node]()
    while all(id(reader) in readers for reader in graph.readers(source)):  # nobody else needs it
        node = graph.maker(source)
        if node and node.op == "trt_spec::Norm" and norm is None:
            norm = node
        elif node and node.op == "Transpose" and node.attributes["perm"] == TURNED and not turn:
            turn = True
        else:
            break
        above.append(node)
        readers, source = {id(node)}, node.inputs[0]
    if norm is None:  # what turns a tensor costs nothing
        return _Rotation(x, False, angles, numbers, "", 0.0, None, old)
    epsilon, dtype = norm.attributes["epsilon"], norm.attributes["dtype"]
    return _Rotation(source, turn, angles, numbers, norm.inputs[1], epsilon, dtype, [*old, *above])


def _first_part(graph: Rewriting, join: Node) -> tuple[Node, str, int, list[Node]] | None:
    """Find the rotation of the first numbers of each head, which the rest follows as it was."""
    if len(join.inputs) != 2 or join.attributes["axis"] not in (3, -1):
        return None
    rotary, rest = graph.maker(join.inputs[0], "RotaryEmbedding"), graph.maker(join.inputs[1], "Slice")
    first = graph.maker(rotary.inputs[0], "Slice") if rotary else None
    if rotary is None or rest is None or first is None or first.inputs[0] != rest.inputs[0]:
        return None
    old = [rotary, rest, first]
    if any(graph.only_reader(node.outputs[0]) is None for node in old):
        return None
    begin, end, *places = _numbers(graph, first)
    if begin or places not in ([3, 1], [-1, 1], [3], [-1]):
        return None
    cut, last, *places = _numbers(graph, rest)
    if cut != end or last < TO_THE_END or places not in ([3, 1], [-1, 1], [3], [-1]):
        return None
    return rotary, first.inputs[0], end, [join, *old]


def _numbers(graph: Rewriting, node: Node) -> list[int]:
    """Return start, end, axis and step of a slice along one axis; -1 for what is not known."""
    known = [graph.constants.get(value) for value in node.inputs[1:]]
    return [int(one) if one is not None and one.numel() == 1 else -1 for one in known]
