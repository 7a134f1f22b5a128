"""Computes single values of a graph on the CPU, so that a row of the table can try what its nodes compute."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...contract import TensorSpec
from ...errors import EngineError
from ..conversion import run_node
from .rewriting import Rewriting

ANY_SIZE = 2


def computed(graph: Rewriting, value: str, given: Mapping[str, Tensor], sizes: Mapping[str, int]) -> Tensor | None:
    """Compute a value, or return None if it depends on more than given values, constants, and the shapes of inputs."""
    nodes = graph.needed_for([value], given)
    blanks = {spec.name: _blank(spec, sizes) for spec in graph.contract.inputs if spec.name not in given}
    if any(name in blanks and node.op != "Shape" for node in nodes for name in node.inputs):
        return None
    values = {**graph.constants, **blanks, **given}
    try:
        for node in nodes:
            run_node(node, values)
    except EngineError:
        return None
    return values.get(value)


def _blank(spec: TensorSpec, sizes: Mapping[str, int]) -> Tensor:
    shape = [sizes.get(dim, ANY_SIZE) if isinstance(dim, str) else dim for dim in spec.shape]
    return torch.empty(shape, dtype=getattr(torch, spec.dtype), device="meta")
