"""Small graphs of float64, run whole and as shards, whose sums are made here, in one process."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor
from trt_spec.engines import TensorSpec, own_share
from trt_spec.engines.torch.conversion import run_node
from trt_spec.engines.torch.onnx_graph import Graph, read_graph
from trt_spec.export.parallel.found import Found
from trt_spec.export.parallel.rules import RULES
from trt_spec.export.parallel.settle import settle
from trt_spec.export.parallel.shard import Shard
from trt_spec.export.parallel.split import _whole

VOCAB, HIDDEN = 16, 8
Made = tuple[str, str, str, dict[str, Any]]  # an operator, its inputs, its outputs and attributes


def small_graph(
    folder: Path, nodes: Sequence[Made], constants: Mapping[str, Any], states: Mapping[str, tuple[int, ...]]
) -> Any:
    """Write a graph that begins with `x` [batch, width, 8], the tokens' rows of `table`; return its contract.

    A constant is its numbers, or a shape that is filled with random ones. States have an input and an output.
    """
    random = np.random.default_rng(0)
    numbers = {
        name: np.asarray(given) if isinstance(given, list) else random.standard_normal(given)
        for name, given in {"table": (VOCAB, HIDDEN), **constants}.items()
    }
    values = dict[str, ir.Value]()
    for name, each in numbers.items():
        tensor = ir.Tensor(each, name=name)
        values[name] = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
    constant = list(values.values())
    inputs = [TensorSpec("input_ids", "int64", ("batch", "width"))]
    inputs += [TensorSpec(f"past_{name}", "float64", ("batch", *shape)) for name, shape in states.items()]
    for spec in inputs:
        kind = ir.TensorType(ir.DataType.INT64 if spec.dtype == "int64" else ir.DataType.DOUBLE)
        values[spec.name] = ir.Value(name=spec.name, shape=ir.Shape(spec.shape), type=kind)
    made = []
    for op, given, names, attributes in [("Gather", "table input_ids", "x", {"axis": 0}), *nodes]:
        made.append(ir.node(op, [values[name] for name in given.split()], attributes, num_outputs=len(names.split())))
        for name, value in zip(names.split(), made[-1].outputs, strict=True):
            value.name, value.type, values[name] = name, ir.TensorType(ir.DataType.DOUBLE), value
    outputs = [TensorSpec("logits", "float64", ("batch", "width", VOCAB))]
    outputs += [TensorSpec(f"present_{name}", "float64", ("batch", *shape)) for name, shape in states.items()]
    for spec in outputs:
        values[spec.name].shape = ir.Shape(spec.shape)
    graph = ir.Graph(
        [values[spec.name] for spec in inputs],
        [values[spec.name] for spec in outputs],
        nodes=made,
        initializers=constant,
        opset_imports={"": 24},
    )
    ir.save(ir.Model(graph, ir_version=10), folder / "whole.onnx")
    return SimpleNamespace(inputs=inputs, outputs=outputs, vocab_size=VOCAB)


def in_small_shards(folder: Path, contract: Any, shards: int, exact: bool) -> tuple[Found, list[Graph]]:
    whole = read_graph(folder / "whole.onnx")
    found, graphs = settle(whole, _whole(whole, contract), shards, VOCAB, RULES), []
    for rank in range(shards):
        model = ir.load(folder / "whole.onnx")
        Shard(model, contract, found, rank, shards, exact).apply()
        ir.save(model, folder / f"{rank}.onnx")
        graphs.append(read_graph(folder / f"{rank}.onnx"))
    return found, graphs


def run_together(graphs: Sequence[Graph], inputs: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Run graphs node by node, side by side, and give each what all of them sum or gather."""
    values = [dict(graph.constants) | dict(given) for graph, given in zip(graphs, inputs, strict=True)]
    for nodes in zip(*(graph.nodes for graph in graphs), strict=True):
        terms = [each[node.inputs[0]] for node, each in zip(nodes, values, strict=True)]
        for node, each in zip(nodes, values, strict=True):
            if node.op == "trt_spec::AllReduce":
                each[node.outputs[0]] = torch.stack(terms).sum(0)
            elif node.op == "trt_spec::AllGather":
                each[node.outputs[0]] = torch.cat(terms, -1)
            else:
                run_node(node, each)
    return values


def off(folder: Path, contract: Any, shards: int, exact: bool, rows: int, width: int) -> float:
    """Return by how much the worst number of all shards' outputs differs from the whole graph's."""
    found, graphs = in_small_shards(folder, contract, shards, exact)
    assert [[spec.name for spec in graph.outputs] for graph in graphs] == [[s.name for s in contract.outputs]] * shards

    def held(name: str, value: Tensor, rank: int) -> Tensor:
        spread = found.spreads.get(name.replace("present_", "past_"))
        if spread is None or name == "logits":
            return value
        return own_share(value, spread.axis, spread.parts, rank, shards)

    random, given = torch.Generator().manual_seed(0), dict[str, Tensor]()
    for spec in contract.inputs:
        shape = [{"batch": rows, "width": width}.get(str(dim), dim) for dim in spec.shape]
        of_tokens = spec.dtype == "int64"
        given[spec.name] = (
            torch.randint(VOCAB, shape, generator=random)
            if of_tokens
            else torch.randn(shape, generator=random, dtype=torch.float64)
        )
    [whole] = run_together([read_graph(folder / "whole.onnx")], [given])
    all_own = [{name: held(name, value, rank) for name, value in given.items()} for rank in range(shards)]
    worst = 0.0
    for rank, own in enumerate(run_together(graphs, all_own)):
        for spec in contract.outputs:
            wanted = held(spec.name, whole[spec.name], rank)
            assert own[spec.name].shape == wanted.shape
            worst = max(worst, float((own[spec.name] - wanted).abs().max()))
    return worst
