"""The built-in check must be seen to fail: each planted fault is one a real exporter has had."""

import shutil
from collections.abc import Callable, Iterable, MutableSequence
from copy import copy
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from trt_spec.engines import ExportError
from trt_spec.export.checking.check import check_graph
from trt_spec.export.checking.oracle import Reference
from trt_spec.export.checking.scenarios import TAIL, Call

from ..kit.mask_faults import (
    mask_as_if_every_call_were_the_first,
    measure_the_window_by_columns,
    nodes,
    see_all_before_in_the_call,
    see_all_of_a_tail,
    see_one_row_too_many,
    see_what_is_as_deep,
    take_columns_for_positions,
    take_columns_for_positions_in_a_tail,
    window,
)


def spoilt(graph, folder: Path, spoil: Callable[[onnx.ModelProto], None]) -> Path:
    """A copy of the graph with a fault."""
    shutil.copytree(graph.folder, folder, dirs_exist_ok=True)
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    spoil(model)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def set_scalar(model: onnx.ModelProto, name: str, number: int) -> None:
    (weight,) = (weight for weight in model.graph.initializer if weight.name == name)
    weight.CopyFrom(numpy_helper.from_array(np.array(number, np.int64), name))


def widen_the_window(model: onnx.ModelProto) -> None:
    set_scalar(model, window(model).input[1], 9)


def forget_the_softcap(model: onnx.ModelProto) -> None:
    for node in nodes(model, "Attention"):
        kept = [attribute for attribute in node.attribute if attribute.name != "softcap"]
        del node.attribute[:]
        node.attribute.extend(kept)


def with_calls(reference: Reference, calls: Iterable[Call]) -> Reference:
    changed = copy(reference)
    changed.script = replace(reference.script, calls=list(calls))
    return changed


def of_its_own_tokens_alone(reference: Reference) -> Reference:
    """Leave the calls out that stand behind a tail: a spoilt graph may not take them."""
    return with_calls(reference, (call for call in reference.script.calls if call.scenario != TAIL))


def swap_key_and_value(model: onnx.ModelProto) -> None:
    for node in nodes(model, "Attention"):
        node.input[1], node.input[2] = node.input[2], node.input[1]


# Faults that only a tree shows.


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("spoil", [take_columns_for_positions, see_what_is_as_deep, see_all_before_in_the_call])
def test_check_refuses_a_graph_that_takes_a_tree_for_something_else(graphs, tmp_path: Path, family: str, spoil) -> None:
    graph = graphs(family)
    reference = of_its_own_tokens_alone(graph.reference)
    with pytest.raises(ExportError, match=r"computes: in the scenario '(deep )?tree' a logit is off by"):
        check_graph(spoilt(graph, tmp_path / "target", spoil), graph.contract, reference)


@pytest.mark.parametrize(
    ("family", "spoil"),
    [("llama", see_all_of_a_tail), ("gpt2", see_all_of_a_tail), ("gemma2", take_columns_for_positions_in_a_tail)],
)
def test_check_refuses_a_graph_that_takes_a_tail_for_a_line(graphs, tmp_path: Path, family: str, spoil) -> None:
    graph = graphs(family)
    with pytest.raises(ExportError, match="computes: in the scenario 'tail' a logit is off by"):
        check_graph(spoilt(graph, tmp_path / "target", spoil), graph.contract, graph.reference)


def test_check_refuses_a_window_that_is_measured_by_columns(graphs, tmp_path: Path) -> None:
    graph = graphs("gemma2")
    reference = of_its_own_tokens_alone(graph.reference)
    with pytest.raises(ExportError, match=r"computes: in the scenario '(deep )?tree' a logit is off by"):
        check_graph(spoilt(graph, tmp_path / "target", measure_the_window_by_columns), graph.contract, reference)


def test_check_refuses_an_accepted_path_whose_entries_stay_where_they_were(graphs) -> None:
    """So it also sees a cache whose entries may not be moved."""
    graph = graphs("llama")
    stay = with_calls(graph.reference, map(without_moves, graph.reference.script.calls))
    with pytest.raises(ExportError, match=r"computes: in the scenario '(tree|tail)' a logit is off by"):
        check_graph(graph.file, graph.contract, stay)


@pytest.mark.parametrize("fault", ["padding is absorbed", "a path stays where it was", "what falls is absorbed"])
def test_check_refuses_recurrent_states_that_stand_elsewhere(recurrent, fault: str) -> None:
    def spoilt_call(call: Call) -> Call:
        if fault == "a path stays where it was":
            return without_moves(call)
        if fault == "padding is absorbed":
            return replace(call, rows=[replace(row, read=len(row.tokens) if row.read else 0) for row in call.rows])
        return replace(call, goes_on=False, rows=[replace(row, read=max(row.read, call.goes_on)) for row in call.rows])

    check_graph(recurrent.file, recurrent.contract, recurrent.reference)
    spoilt_calls = with_calls(recurrent.reference, map(spoilt_call, recurrent.reference.script.calls))
    with pytest.raises(ExportError, match="computes: in the scenario"):
        check_graph(recurrent.file, recurrent.contract, spoilt_calls)


def take_trees_for_lines(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    for node in nodes(model, "If"):
        node.input[0] = "yes"


def forget_what_is_pending(model: onnx.ModelProto) -> None:
    for line in lines_of(model):
        first, *others = (node for node in line if node.op_type == "LinearAttention")
        for second in others:
            second.input[3] = first.input[3]


def forget_what_is_read_to_stand(model: onnx.ModelProto) -> None:
    for line in lines_of(model):
        first, *others = (node for node in line if node.op_type == "LinearAttention")
        if not others:
            after, first.output[1] = first.output[1], "nobody_reads_this"
            line.append(helper.make_node("Identity", [first.input[3]], [after]))


def absorb_what_is_not_there(model: onnx.ModelProto) -> None:
    for node in (node for line in lines_of(model) for node in line if node.op_type == "Where"):
        node.input[2] = node.input[1]


def lines_of(model: onnx.ModelProto) -> list[MutableSequence[onnx.NodeProto]]:
    """The nodes by which each recurrent layer answers a line, whose tokens all stand or may all fall."""
    found = []
    for node in nodes(model, "If"):
        branches = {attribute.name: attribute.g.node for attribute in node.attribute}
        [inner] = (each for each in branches["else_branch"] if each.op_type == "If")
        found += [branches["then_branch"]]
        found += [attribute.g.node for attribute in inner.attribute if attribute.name == "then_branch"]
    assert found
    return found


@pytest.mark.parametrize(
    "spoil",
    [take_trees_for_lines, forget_what_is_pending, forget_what_is_read_to_stand, absorb_what_is_not_there],
)
def test_check_refuses_lines_that_are_absorbed_wrongly(recurrent, tmp_path: Path, spoil) -> None:
    """In the graph of ONNX Runtime, where a branch answers lines and another all else."""
    shutil.copytree(recurrent.folder, tmp_path / "target")
    file = tmp_path / "target" / "onnxruntime.onnx"
    model = onnx.load(file, load_external_data=False)
    spoil(model)
    onnx.save(model, file)
    with pytest.raises(ExportError, match="computes: in the scenario"):
        check_graph(tmp_path / "target" / "model.onnx", recurrent.contract, recurrent.reference)


def without_moves(call: Call) -> Call:
    return replace(call, rows=[replace(row, accepted=None) for row in call.rows])


@pytest.mark.parametrize(
    ("family", "spoil"),
    [
        ("llama", see_one_row_too_many),
        ("llama", mask_as_if_every_call_were_the_first),
        ("gpt2", mask_as_if_every_call_were_the_first),
        ("gemma2", see_one_row_too_many),
        ("gemma2", widen_the_window),
        ("gemma2", forget_the_softcap),
        ("gpt2", swap_key_and_value),
    ],
)
def test_check_refuses_a_graph_that_computes_something_else(graphs, tmp_path: Path, family: str, spoil) -> None:
    graph = graphs(family)
    reference = of_its_own_tokens_alone(graph.reference)
    with pytest.raises(ExportError, match=r"graph does not compute what its checkpoint computes: in the scenario"):
        check_graph(spoilt(graph, tmp_path / "target", spoil), graph.contract, reference)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_check_refuses_weights_that_changed_on_the_way_to_disk(graphs, tmp_path: Path, family: str) -> None:
    graph = graphs(family)
    shutil.copytree(graph.folder, tmp_path / "target")
    weights = np.memmap(tmp_path / "target" / "weights.bin", np.float32, "r+")
    weights[len(weights) // 2] += 1.0
    weights.flush()
    with pytest.raises(ExportError, match=r"a logit is off by \S+, expected at most \S+ \(0.001 of their standard"):
        check_graph(tmp_path / "target" / "model.onnx", graph.contract, graph.reference)


def test_check_refuses_a_graph_that_gives_no_numbers(graphs, tmp_path: Path) -> None:
    graph = graphs("llama")
    shutil.copytree(graph.folder, tmp_path / "target")
    np.memmap(tmp_path / "target" / "weights.bin", np.float32, "r+")[-1] = np.nan
    with pytest.raises(ExportError, match="a logit is off by inf"):
        check_graph(tmp_path / "target" / "model.onnx", graph.contract, graph.reference)
