"""A layer that is like a traced one is a copy of it: the graph is the one that a trace of every layer gives."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import onnx_ir as ir
import pytest
from trt_spec.export.checkpoints.checkpoint import load_model, open_checkpoint
from trt_spec.export.tracing import modules as tracing
from trt_spec.export.tracing import repeating
from trt_spec.export.writing import graph as graphs
from trt_spec.export.writing.quiet import quiet_libraries

from ..kit.families import tiny_checkpoint

FOUR = {"num_hidden_layers": 4}
ALTERNATING = FOUR | {"layer_types": ["sliding_attention", "full_attention"] * 2}
BY_PLACE = {"num_hidden_layers": 3, "scale_attn_by_inverse_layer_idx": True}
OTHERS = (
    ("llama", FOUR, 3),
    ("gpt2", {"num_hidden_layers": 3}, 2),
    ("gpt2", BY_PLACE, 0),
    ("qwen3_moe", FOUR, 3),
    ("smollm3", FOUR | {"no_rope_layers": [1, 1, 0, 1], "layer_types": ["full_attention"] * 4}, 2),
    (
        "modernbert-decoder",
        FOUR | {"layer_types": ["full_attention", *["sliding_attention"] * 3]},
        2,
    ),  # the first has no norm
    ("olmo2", FOUR, 3),
    ("opt", FOUR, 3),
    ("phi3", FOUR, 3),
    ("gpt_neox", FOUR, 3),
    ("gpt_oss", ALTERNATING, 2),
    ("gemma3_text", ALTERNATING, 2),
    ("zamba2", {}, 1),  # layers with attention have adapters of their own
)


def traced(checkpoint: Path, every_layer: bool) -> tuple[ir.Model, int]:
    """Give the graph that is written, and how many of its layers are copies."""
    opened = open_checkpoint(checkpoint)
    contract = opened.shape.contract(64, "float32")
    model = load_model(opened, "float32")
    counted: list[int] = []

    def count(*arguments: Any) -> int:
        counted.append(repeating.repeat_layers(*arguments))
        return counted[0]

    how = patch.object(tracing, "each_kind_once", lambda *_: nullcontext()) if every_layer else nullcontext()
    with quiet_libraries(), how, patch.object(graphs, "repeat_layers", count):
        graph, _ = graphs.build_graph(model, contract, opened.shape.positions)
    for weight in graph.graph.initializers.values():
        assert weight.const_value is not None
        weight.const_value = ir.tensor(weight.const_value.numpy().copy())
    return graph, counted[0]


def said(graph: ir.Graph) -> dict[str | None, int]:
    """Say of each output by which operators it comes from which inputs and numbers."""
    meaning: dict[Any, Any] = {None: None} | {value: value.name for value in graph.inputs}
    for weight in graph.initializers.values():
        assert weight.const_value is not None
        numbers = weight.const_value.numpy()
        meaning[weight] = hash((str(numbers.dtype), numbers.shape, numbers.tobytes()))
    for node in graph:
        attributes = tuple(sorted(f"{name} {attribute.value}" for name, attribute in node.attributes.items()))
        made = hash((node.domain, node.op_type, attributes, tuple(meaning[value] for value in node.inputs)))
        meaning |= {value: hash((made, place)) for place, value in enumerate(node.outputs)}
    return {value.name: meaning[value] for value in graph.outputs}


@pytest.mark.parametrize(
    ("family", "settings", "copies"),
    [
        ("gemma2", ALTERNATING, 2),
        *(pytest.param(*other, marks=pytest.mark.exhaustive) for other in OTHERS),
    ],
)
def test_the_graph_is_that_of_a_trace_of_every_layer(
    tmp_path: Path, family: str, settings: dict[str, Any], copies: int
) -> None:
    checkpoint = tiny_checkpoint(family, tmp_path / "checkpoint", **settings)
    found, repeated = traced(checkpoint, every_layer=False)
    expected, none = traced(checkpoint, every_layer=True)
    assert (repeated, none) == (copies, 0)
    assert said(found.graph) == said(expected.graph)
    order, expected_order = (
        [name for name in graph.graph.initializers if ".weight" in name] for graph in (found, expected)
    )
    assert order == expected_order  # in which they are written
    assert len(found.graph) == len(expected.graph)


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("self_attn.scaling", 0.5), ("mlp.act_fn", abs), ("input_layernorm.variance_epsilon", 1e-3)],
)
def test_a_layer_that_computes_otherwise_is_of_a_kind_of_its_own(tmp_path: Path, attribute: str, value: Any) -> None:
    opened = open_checkpoint(tiny_checkpoint("llama", tmp_path / "checkpoint", **FOUR))
    model = load_model(opened, "float32")
    kinds = repeating._Kinds(model.config, list(model.model.layers), {})
    assert len({kinds._described(place) for place in range(4)}) == 1
    part, _, name = attribute.partition(".")
    module = model.model.layers[2].get_submodule(part)
    module._modules.pop(name, None)
    setattr(module, name, value)
    assert len({kinds._described(place) for place in (0, 1, 3)}) == 1
    assert kinds._described(2) != kinds._described(0)


def test_what_a_configuration_says_of_a_place_makes_a_kind(tmp_path: Path) -> None:
    opened = open_checkpoint(tiny_checkpoint("llama", tmp_path / "checkpoint", **FOUR))
    model = load_model(opened, "float32")
    model.config.some_rule = [1, 1, 2, 1]
    kinds = repeating._Kinds(model.config, list(model.model.layers), {})
    assert [kinds._described(place) == kinds._described(0) for place in range(4)] == [True, True, False, True]
