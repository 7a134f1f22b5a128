"""Runs the bundle's graph as torch ops on any torch device, converted for each shape of a call, eager or compiled."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, fx

from ..contract import PREFILL_WIDTH, AnyContract, Contract, in_words
from ..engine import Engine, Step, chunks
from ..errors import EngineError, first_line
from .conversion import Recorder, fold, run_node
from .onnx_graph import read_graph
from .refusals import refuse_copied_cache, refuse_unknown

Shape = tuple[tuple[str, int], ...]  # the size of each symbol of the contract

KEPT_SHAPES = 256  # converted graphs, a few hundred kilobytes each
TRIAL: Shape = (
    ("batch", 2),
    ("capacity", 5),
    ("pending", 4),
    ("rows", 2),
    ("slots", 8),
    ("source", 6),
    ("tail", 4),
    ("width", 3),
)


def open_engines(
    name: str, models: Sequence[tuple[Path, AnyContract]], device: str, exact_weights: bool, alone: bool
) -> "list[TorchEngine]":
    """Open the graphs; their weights are always exact here."""
    return [TorchEngine(*model, device, compiled=name == "torch-compiled") for model in models]


class TorchEngine(Engine):
    """A graph as torch ops. Quantised matrices are widened when it is opened, rows of an embedding when they are read.

    A step reads no tensor on the host and allocates only by torch's own allocator, so a caller may capture it.
    """

    def __init__(self, graph: Path, contract: AnyContract, device: str, compiled: bool) -> None:
        try:
            torch.zeros(1, device=device).cpu()
        except (RuntimeError, AssertionError) as error:
            raise EngineError(
                f"engine torch cannot use the device {device!r} ({first_line(error)}); expected cpu or cuda"
            ) from error
        self.contract, self.device, self._compiled = cast("Contract", contract), device, compiled
        # Full capacity is cheap on a GPU, and compiled code would be compiled anew for every length.
        self.static_capacity = self.reads_prefixes = compiled or torch.device(device).type != "cpu"
        read = read_graph(graph)
        contract.check(str(graph), read.inputs, read.outputs)
        refuse_unknown(str(graph), read.nodes)
        refuse_copied_cache(str(graph), contract, read.nodes)
        self._nodes, self._constants = fold(read, device)
        self._module = lru_cache(KEPT_SHAPES)(self._convert)
        self._compiled_module = lru_cache(KEPT_SHAPES)(self._compile)
        self._computed = [spec for spec in contract.outputs if spec.name not in contract.aliases]
        self._convert(TRIAL)  # refuse now what cannot be converted

    def prefill_widths(self, tokens: int) -> list[int]:
        """Use powers of two, the largest first: a prompt may have any width, and not each is worth a conversion."""
        return [width for chunk in chunks(tokens, PREFILL_WIDTH) for width in _powers_of_two(chunk)]

    def step(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Step:
        sizes = self.contract.sizes({**inputs, **outputs})
        shape = tuple(sorted(sizes.items()))
        module = self._module(shape)
        given = [inputs[spec.name] for spec in self.contract.inputs]
        wanted = [outputs[spec.name] for spec in self._computed]
        again = False

        def run() -> None:
            nonlocal again
            try:
                with torch.inference_mode():
                    # A step that repeats belongs to a round; prefill steps run too seldom to compile.
                    compute = self._compiled_module(shape) if self._compiled and again else module
                    for place, found in zip(wanted, compute(*given), strict=True):
                        place.copy_(found)
                again = True
            except torch.OutOfMemoryError:  # the decoder opened all models and says how much they need
                raise
            except (RuntimeError, IndexError) as error:
                raise EngineError(f"torch failed at {in_words(sizes)}: {first_line(error)}") from error

        return Step(inputs, outputs, run)

    def capturable(self) -> bool:
        return torch.device(self.device).type == "cuda"

    def converted(self, sizes: Mapping[str, int]) -> fx.GraphModule:
        """Return the graph as the operations of a step of these sizes, which a step on a GPU would launch."""
        return self._module(tuple(sorted(sizes.items())))

    def close(self) -> None:
        self._constants = {}
        self._module.cache_clear()
        self._compiled_module.cache_clear()

    def _compile(self, shape: Shape) -> Callable[..., tuple[Tensor, ...]]:
        return torch.compile(self._module(shape), fullgraph=True, dynamic=False)

    def _convert(self, shape: Shape) -> fx.GraphModule:
        """Convert the graph for these sizes, to all outputs except the cache, which is written in place."""
        sizes = dict(shape)
        recorder = Recorder(self.device)
        values = dict(self._constants)
        for spec in self.contract.inputs:
            values[spec.name] = recorder.input(spec, sizes)
        with recorder:
            for node in self._nodes:
                run_node(node, values)
        return recorder.module([values[spec.name] for spec in self._computed])


def _powers_of_two(width: int) -> list[int]:
    return [1 << bit for bit in reversed(range(width.bit_length())) if width >> bit & 1]
