"""Runs a step as compiled code: torch's compiler gets each form of its regions once."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from ..errors import EngineError
from .kept_code import KeptCode
from .regions import Region, regions

# Else each process runs the C++ compiler over its headers, and keeps these in a folder that others may write to.
OPTIONS = {"cpp_cache_precompile_headers": False}


def layout(tensors: Sequence[Tensor]) -> tuple[object, ...]:
    """Return all that compiled code relies on: sizes, types and strides, and which of the tensors share memory."""
    memories = [one.untyped_storage().data_ptr() for one in tensors]
    return tuple(
        (tuple(one.shape), one.dtype, one.stride(), memories.index(memory))
        for one, memory in zip(tensors, memories, strict=True)
    )


class CompiledStep:
    """A module, which the first call compiles; all tensors that it is given later have the same layout."""

    def __init__(self, module: fx.GraphModule, kept: KeptCode) -> None:
        nodes = list(module.graph.nodes)
        self._inputs = [node for node in nodes if node.op == "placeholder"]
        self._weights = {node: module.get_buffer(str(node.target)) for node in nodes if node.op == "get_attr"}
        self._regions = regions(module.graph)
        self._forms: dict[object, Callable[..., Sequence[Tensor]]] = {}
        self._code: list[Callable[..., Sequence[Tensor]]] = []  # of the regions that have been compiled
        self._kept = kept

    def __call__(self, *given: Tensor) -> None:
        values = self._weights | dict(zip(self._inputs, given, strict=True))
        first = len(self._code) < len(self._regions)
        for place, region in enumerate(self._regions):
            read = [values[one] for one in region.reads]
            if place == len(self._code):
                self._code.append(self._compiled(region, read))
            values.update(zip(region.makes, self._code[place](*read), strict=True))
        if first:
            self._kept.keep()

    def _compiled(self, region: Region, read: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
        from torch._inductor.exc import InductorError, InvalidCxxCompiler  # which loads torch's compiler

        form = region.module.code, layout(read)
        if form not in self._forms:
            try:
                with self._kept.in_place():
                    self._forms[form] = torch._inductor.standalone_compile(
                        region.module,
                        [*read],
                        dynamic_shapes="from_example_inputs",
                        options={"config_patches": OPTIONS},
                        donate_graph_module=True,
                    )
            except InductorError as error:
                if not isinstance(error.inner_exception, InvalidCxxCompiler):
                    raise
                raise EngineError(
                    "engine torch-compiled finds no C++ compiler that works; install g++, name one in the variable "
                    "CXX, or use engine torch"
                ) from error
        return self._forms[form]
