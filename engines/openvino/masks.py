"""Finds out from the nodes of an attention mask which entries a token sees."""

from collections.abc import Iterator
from typing import Any

SCATTER = "ScatterElementsUpdate"


def window_of(mask: Any) -> int:
    """Return how many entries a token sees, itself included, or 0 if it sees all up to itself; refuse other masks."""
    window, causal = 0, False
    for term in _terms(mask.get_node()):
        kind, inputs = term.get_type_name(), _inputs(term)
        if kind == SCATTER and _name(inputs[2]) == "ancestors" and _is_earlier(inputs[0]):
            causal = True
        elif kind == "Greater" and _is_position(inputs[0]) and (found := _distance(inputs[1])):
            window = found
        elif kind == "LessEqual" and _is_position(inputs[0]) and _is_own_position(inputs[1]):
            pass  # as its ancestors say
        elif kind == "Select":
            raise ValueError("its attention adds numbers to the scores, which this engine lacks")
        elif kind != "Constant" or not _constant(term):
            raise ValueError(f"its attention has a mask by {kind}, which PagedAttention lacks")
    if not causal:
        raise ValueError("its attention is not causal")
    return window


def _terms(node: Any) -> Iterator[Any]:
    node = _unshaped(node)
    if node.get_type_name() != "LogicalAnd":
        yield node
        return
    for one in _inputs(node):
        yield from _terms(one)


def _is_earlier(node: Any) -> bool:
    """Say whether a node tells which entries were there before the call."""
    node = _unshaped(node)
    if node.get_type_name() != "Less":
        return False
    entry, start = _inputs(node)
    return not reads(entry, "start") and _name(_unshaped(start)) == "start"


def _is_position(node: Any) -> bool:
    """Say whether a node holds the position of each entry."""
    node = _unshaped(node)
    return node.get_type_name() == SCATTER and _is_own_position(node.input_value(2).get_node())


def _is_own_position(node: Any) -> bool:
    """Say whether a node holds the position of each token."""
    node = _unshaped(node)
    names = [_name(_own(_unshaped(one))) for one in _inputs(node)]
    return node.get_type_name() == "Add" and sorted(names) == ["depths", "start"]


def _own(node: Any) -> Any:
    """Return what a node picks a call's own tokens from, of all the entries that it gets, or else the node."""
    return node.input_value(0).get_node() if node.get_type_name() == "Gather" else node


def _distance(node: Any) -> int:
    """Return the number that is subtracted from a token's position, or 0 if the node does something else."""
    if node.get_type_name() != "Subtract" or not _is_own_position(node.input_value(0).get_node()):
        return 0
    return int(_constant(node.input_value(1).get_node()))


def _unshaped(node: Any) -> Any:
    """Return the node that this one only gives another shape, or repeats."""
    while node.get_type_name() in ("Broadcast", "Reshape", "Unsqueeze") or _repeats(node):
        node = node.input_value(0).get_node()
    return node


def _repeats(node: Any) -> bool:
    return node.get_type_name() == "Concat" and len({one.get_name() for one in _inputs(node)}) == 1


def _inputs(node: Any) -> list[Any]:
    return [node.input_value(place).get_node() for place in range(node.get_input_size())]


def _constant(node: Any) -> Any:
    if node.get_type_name() != "Constant" or node.get_data().size != 1:
        raise ValueError(f"its attention has a window by {node.get_type_name()}, expected a number")
    return node.get_data().item()


def _name(node: Any) -> str:
    """Return the name of an input of the graph, or "" for any other node."""
    return str(node.output(0).get_any_name()) if node.get_type_name() == "Parameter" else ""


def reads(node: Any, name: str) -> bool:
    """Say whether a node is computed from this input, among others."""
    waiting, seen = [node], set()
    while waiting:
        one = waiting.pop()
        if _name(one) == name:
            return True
        if one.get_name() not in seen:
            seen.add(one.get_name())
            waiting += _inputs(one)
    return False
