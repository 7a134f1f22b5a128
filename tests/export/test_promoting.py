"""Types are promoted as torch promotes them when it runs each operator anew."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.fx import Interpreter
from trt_spec.export.tracing.promoting import promoted_by_trace
from trt_spec.export.writing.graph import OPSET


class Mixed(nn.Module):
    """Whole numbers with fractions, halves with singles, a truth with a number, and what follows on each."""

    def forward(self, x: Tensor, numbers: Tensor, half: Tensor) -> tuple[Tensor, ...]:
        seen = numbers > 1
        mean = numbers.sum(-1, keepdim=True) / numbers.shape[-1]
        total = x * numbers + half
        return total.sin() * mean, seen * 2.5 + half.sqrt(), torch.where(seen, x, half) + 1, (numbers + 0.5).exp()


def exported(how: AbstractContextManager[None]) -> tuple[list[Any], int]:
    """Give the nodes of the graph, its types, and how many nodes were run anew."""
    given = torch.ones(3, 4), torch.ones(3, 4, dtype=torch.int64), torch.ones(3, 4, dtype=torch.float16)
    run = Interpreter.run_node
    with patch.object(Interpreter, "run_node", autospec=True, side_effect=run) as anew, how:
        program = torch.onnx.export(
            Mixed().eval(),
            given,
            dynamo=True,
            verbose=False,
            optimize=False,
            opset_version=OPSET,
            dynamic_shapes=({0: "batch"}, {0: "batch"}, {0: "batch"}),
        )
    assert program is not None
    nodes = [
        (node.op_type, [value.name for value in node.inputs if value], [(v.dtype, str(v.shape)) for v in node.outputs])
        for node in program.model.graph
    ]
    return nodes, anew.call_count


def test_what_is_promoted_is_what_torch_promotes():
    (expected, every), (found, few) = exported(nullcontext()), exported(promoted_by_trace())
    assert found == expected
    assert sum(kind == "Cast" for kind, _, _ in found) > 4
    assert few < every - 15, "torch runs what it promotes"
    assert exported(nullcontext()) == (expected, every)
