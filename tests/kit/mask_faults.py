"""Planted faults of a graph's masks and positions: those that exporters have had, and what only a tree shows."""

import numpy as np
import onnx
from onnx import numpy_helper


def nodes(model: onnx.ModelProto, kind: str) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == kind]


def made_by(model: onnx.ModelProto) -> dict[str, onnx.NodeProto]:
    return {name: node for node in model.graph.node for name in node.output}


def insert(model: onnx.ModelProto, before: onnx.NodeProto | None, *steps: tuple[str, list[str], str]) -> None:
    """Add nodes before another or all others: operator, inputs, output."""
    axes = ("first_axis", [0]), ("depth_axis", [1]), ("query_axes", [1, 3]), ("last_axis", [2])
    for name, number in (("zero", 0), ("one", 1), ("two", 2), *axes):
        if not any(weight.name == name for weight in model.graph.initializer):
            model.graph.initializer.append(numpy_helper.from_array(np.array(number, np.int64), name))
    place = 0 if before is None else list(model.graph.node).index(before)
    for kind, inputs, output in reversed(steps):
        model.graph.node.insert(place, onnx.helper.make_node(kind, inputs, [output]))


def call_rows(model: onnx.ModelProto) -> tuple[str, str]:
    """The rows of the cache [T], and those that a call writes [B, S]."""
    made, (earlier,) = made_by(model), nodes(model, "Less")
    (seen,) = (node for node in nodes(model, "ScatterElements") if node.input[2] == "ancestors")
    return earlier.input[0], made[made[seen.input[1]].input[0]].input[0]


def see_one_row_too_many(model: onnx.ModelProto) -> None:
    rows, own = call_rows(model)
    attentions = nodes(model, "Attention")
    next_rows = [("Add", [own, "one"], "after"), ("Unsqueeze", ["after", "query_axes"], "after_each")]
    insert(model, attentions[0], *next_rows, ("Equal", [rows, "after_each"], "one_more"))
    for place, node in enumerate(attentions):
        insert(model, node, ("Or", [node.input[3], "one_more"], f"too_many_{place}"))
        node.input[3] = f"too_many_{place}"


def mask_as_if_every_call_were_the_first(model: onnx.ModelProto) -> None:
    """What TensorRT makes of causal attention."""
    rows, own = call_rows(model)
    attentions = nodes(model, "Attention")
    columns = [("Unsqueeze", ["start", "depth_axis"], "first"), ("Sub", [own, "first"], "column")]
    columns.append(("Unsqueeze", ["column", "query_axes"], "query_column"))
    insert(model, attentions[0], *columns, ("LessOrEqual", [rows, "query_column"], "causal"))
    for node in attentions:
        node.input[3] = "causal"


def instead(model: onnx.ModelProto, old: str, new: str) -> None:
    """Let every node read another value, except sizes."""
    for node in model.graph.node:
        if node.op_type != "Shape":
            node.input[:] = [new if name == old else name for name in node.input]


def columns(model: onnx.ModelProto) -> list[tuple[str, list[str], str]]:
    """Steps that make `columns`, the places [S] of tokens in their call."""
    width = [("Shape", ["input_ids"], "sizes"), ("Gather", ["sizes", "one"], "wide")]
    return [*width, ("Range", ["zero", "wide", "one"], "columns")]


def take_columns_for_positions(model: onnx.ModelProto) -> None:
    instead(model, "depths", "columns_of_all")
    insert(model, None, *columns(model), ("Unsqueeze", ["columns", "first_axis"], "columns_of_all"))


def window(model: onnx.ModelProto) -> onnx.NodeProto:
    """The node that takes a window from the position of each token."""
    (beyond,) = nodes(model, "Greater")
    return made_by(model)[beyond.input[1]]


def measure_the_window_by_columns(model: onnx.ModelProto) -> None:
    _, own = call_rows(model)
    (positions,) = (node for node in nodes(model, "ScatterElements") if node.input[2] != "ancestors")
    behind = window(model)
    insert(model, behind, ("Unsqueeze", [own, "query_axes"], "own_columns"))
    instead(model, behind.input[0], "own_columns")
    instead(model, positions.output[0], positions.input[0])


def see_what_is_as_deep(model: onnx.ModelProto) -> None:
    """Siblings, and all others of one depth."""
    instead(model, "ancestors", "too_many")
    one_by_one = [("Unsqueeze", ["depths", "depth_axis"], "theirs"), ("Unsqueeze", ["depths", "last_axis"], "own")]
    one_by_one.append(("Equal", ["theirs", "own"], "as_deep"))
    insert(model, None, *one_by_one, ("Or", ["ancestors", "as_deep"], "too_many"))


def see_all_before_in_the_call(model: onnx.ModelProto) -> None:
    """What a graph without trees does."""
    instead(model, "ancestors", "triangle")
    steps = [("Unsqueeze", ["columns", "depth_axis"], "query_columns"), ("Shape", ["ancestors"], "square")]
    steps.append(("LessOrEqual", ["columns", "query_columns"], "before"))
    insert(model, None, *columns(model), *steps, ("Expand", ["before", "square"], "triangle"))


def places_in_a_tail(model: onnx.ModelProto) -> list[tuple[str, list[str], str]]:
    """Steps that make `places`, those [W] of all that a call is told of from its own first token on."""
    told = [("Shape", ["ancestors"], "told"), ("Gather", ["told", "one"], "own"), ("Gather", ["told", "two"], "all")]
    return [
        *told,
        ("Range", ["zero", "all", "one"], "each"),
        ("Sub", ["all", "own"], "before"),
        ("Sub", ["each", "before"], "places"),
    ]


def see_all_of_a_tail(model: onnx.ModelProto) -> None:
    instead(model, "ancestors", "too_many")
    before = ("Less", ["places", "zero"], "in_the_tail")
    insert(model, None, *places_in_a_tail(model), before, ("Or", ["ancestors", "in_the_tail"], "too_many"))


def take_columns_for_positions_in_a_tail(model: onnx.ModelProto) -> None:
    instead(model, "depths", "some_columns")
    before = [("Less", ["places", "zero"], "in_the_tail"), ("Unsqueeze", ["places", "first_axis"], "row_of_places")]
    where = ("Where", ["in_the_tail", "row_of_places", "depths"], "some_columns")
    insert(model, None, *places_in_a_tail(model), *before, where)
