"""Exports share torch's table of translations, and leave it and torch as they were."""

import torch
from torch import Tensor, nn
from torch.onnx._internal.exporter._registration import ONNXRegistry
from trt_spec.export.tracing import translations
from trt_spec.export.tracing.translations import translations_kept
from trt_spec.export.writing.graph import OPSET


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 + x.sin()


def exported() -> list[str]:
    program = torch.onnx.export(
        Doubled().eval(), (torch.ones(2),), dynamo=True, verbose=False, optimize=False, opset_version=OPSET
    )
    assert program is not None
    return [node.op_type for node in program.model.graph]


def test_the_table_is_made_once_and_neither_it_nor_torch_is_changed():
    make, own = ONNXRegistry.from_torchlib, exported()
    translations._table.cache_clear()
    with translations_kept():
        assert exported() == own
        table = translations._table(opset_version=OPSET)
        before = {name: list(known) for name, known in table.functions.items()}
        assert exported() == own
        assert {name: list(known) for name, known in table.functions.items()} == before
    assert translations._table.cache_info().misses == 1
    assert ONNXRegistry.from_torchlib == make
    assert exported() == own
    assert translations._table.cache_info().hits == 2, "one export, and this test"
