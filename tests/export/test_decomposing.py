"""What is decomposed operator by operator is what torch makes of the whole by tracing it again."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from trt_spec.export.tracing.decomposing import decomposed_in_place
from trt_spec.export.writing.graph import OPSET


class Composed(nn.Module):
    """Casts that change a type and ones that do not, views, parts of a tensor, operators that have rules."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        first, second = x.transpose(1, 2).chunk(2, dim=-1)
        both = (first > 0) & (second > 0)
        squares = first.square().to(torch.float64).type_as(x) + both.to(torch.float32)
        product = squares.transpose(1, 2).contiguous().reshape(x.shape[0], -1) @ y.T
        return product.float(), squares.min(second).double()


class WrittenInPlace(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        total = x + 1
        total[0].mul_(2)
        return total.square() + y[0, 0]


class WrittenAnew(nn.Module):
    """What is written to belongs to nobody else."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        best, chosen = x.topk(2, dim=-1)
        best /= best.sum(dim=-1, keepdim=True)
        total = x * 2
        total.add_(y[0, 0]).mul_(2)
        return best.float() * chosen + total.amax(-1, keepdim=True)


class SeenBefore(nn.Module):
    """A view of what is written to shows what is written."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        total = x + 1
        first = total[0]
        total *= 2
        return first + y[0, 0]


class WrittenWide(nn.Module):
    """What is written keeps its type."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        total = x.to(torch.float16) + 1
        total *= y[0, 0].double()
        return total.square()


class Flattened(nn.Module):
    """How many elements there are, only the whole can say."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.silu(x).transpose(0, 1).reshape(-1) * y[0, 0].square()


def export(module: nn.Module, how: AbstractContextManager[None]) -> tuple[list[Any], int]:
    """Give the graph, and how often torch traced it again."""
    options: Any = {"dynamo": True, "optimize": False, "verbose": False, "dynamic_shapes": ({0: "batch"}, None)}
    trace_again = ExportedProgram.run_decompositions
    with patch.object(ExportedProgram, "run_decompositions", autospec=True, side_effect=trace_again) as again, how:
        given = torch.zeros(2, 4, 6), torch.zeros(5, 12)
        program = torch.onnx.export(module.eval(), given, opset_version=OPSET, **options)
    assert program is not None
    return spelled(program.model), again.call_count


def spelled(model: ir.Model) -> list[Any]:
    """Nodes and results, each value as the place where it first appears."""
    places: dict[Any, int] = {}
    nodes: list[Any] = []
    for node in model.graph:
        if node.op_type == "Identity":
            places[node.outputs[0]] = places.setdefault(node.inputs[0], len(places))
            continue
        inputs = [None if value is None else places.setdefault(value, len(places)) for value in node.inputs]
        outputs = [(places.setdefault(value, len(places)), value.dtype) for value in node.outputs]
        attributes = sorted(f"{name} {attribute.value}" for name, attribute in node.attributes.items())
        nodes.append((node.op_type, inputs, outputs, attributes))
    return [*nodes, [places.setdefault(value, len(places)) for value in model.graph.outputs]]


@pytest.mark.parametrize(
    ("module", "again"),
    [(Composed(), 0), (WrittenAnew(), 0)]
    + [(made(), 1) for made in (WrittenInPlace, SeenBefore, WrittenWide, Flattened)],
)
def test_operators_become_what_a_second_trace_makes_of_them_and_what_needs_one_gets_it(
    module: nn.Module, again: int
) -> None:
    expected, once = export(module, nullcontext())
    found, traced_again = export(module, decomposed_in_place())
    assert (once, traced_again) == (1, again)
    assert found == expected
