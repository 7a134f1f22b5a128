"""Torch traces a model for seconds, and the same for all weights: here once in a process for each configuration.

Its table of translations to ONNX, which takes most of a second, is made once as well.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import onnx_ir as ir
from torch.onnx._internal.exporter._registration import ONNXRegistry
from trt_spec.engines import CALL, SOURCE, Contract, EncoderContract
from trt_spec.export.tracing.hidden_states import Features
from trt_spec.export.writing import graph as graphs

TRACE = graphs.trace
TABLE = staticmethod(cache(ONNXRegistry.from_torchlib))
kept: dict[str, ir.Model] = {}


def traced_once(
    model: Any, contract: Contract | EncoderContract, positions: int, features: Mapping[str, Features] | None = None
) -> ir.Model:
    """Do what `trace` does, with the trace of an earlier model of this configuration where there is one.

    Those of heads and of their targets, and of what has to do with sources, hold more than a configuration says; those
    of latents hold weights that are made of a model's.
    """
    plain = isinstance(contract, Contract) and not (contract.of_kind(CALL) or contract.of_kind(SOURCE))
    if features or not plain or getattr(model.config, "kv_lora_rank", None):
        return TRACE(model, contract, positions, features or {})
    sizes = [(name, tuple(weight.shape)) for name, weight in model.named_parameters()]
    asked = repr((model.config.to_dict() | {"_name_or_path": ""}, contract, positions, sizes))
    if asked not in kept:
        kept[asked] = TRACE(model, contract, positions)
    graph = kept[asked].clone()
    weights = dict(model.named_parameters())
    for name, value in graph.graph.initializers.items():
        if name in weights:
            value.const_value = type(value.const_value)(weights[name], name=name)
    return graph


@contextmanager
def sharing_traces() -> Iterator[None]:
    """Until the block ends, exports take the trace of an earlier one where they can.

    For claims of what is made of a trace, not for those of tracing itself.
    """
    with patch.object(graphs, "trace", traced_once), patch.object(ONNXRegistry, "from_torchlib", TABLE):
        yield
