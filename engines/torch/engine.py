"""Runs the bundle's graph as torch ops on any torch device, converted for each shape of a call, eager or compiled."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cache, lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, fx

from ..bundle import ADAPTED
from ..contract import ADAPTER, PREFILL_WIDTH, TOKEN, AnyContract, Contract, VisionContract, in_words
from ..engine import Engine, Step, chunks
from ..errors import EngineError, first_line
from .compiled_step import CompiledStep, layout
from .conversion import Recorder, fold, place, run_node
from .fusing import PLACE, Rewriting, fuse, kept, reads_live
from .kept_code import KeptCode
from .kernels import FEW_ROWS, composed
from .kernels.attention import most_bytes
from .onnx_graph import Node, read_graph
from .refusals import refuse_copied_cache, refuse_unknown

Sizes = tuple[tuple[str, int], ...]  # the size of each symbol of the contract

LOGITS, WIDENS = "logits", "trt_spec::CastInto"
KEPT_SHAPES = 256  # converted graphs, a few hundred kilobytes each
WITH_KERNELS = ("cuda",)  # devices that run a fused operator as one kernel, with Triton
TRIAL: Sizes = (
    ("batch", 2),
    ("capacity", 5),
    ("columns", 6),
    ("entries", 3),
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
    """A graph as torch ops, of which several are one where a GPU has a kernel for them; `fused` says how many.

    Quantised matrices are widened when it is opened, except on CUDA, and rows of an embedding when they are read.

    A step reads no tensor on the host and allocates only by torch's own allocator, so a caller may capture it.
    """

    def __init__(
        self,
        graph: Path,
        contract: AnyContract,
        device: str,
        compiled: bool,
        weightless: bool = False,
        known: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Open a graph; `weightless`, it is converted as for a GPU and cannot run, and its weights are not read.

        The graph is that with room for adapters if constants are given that are `known` from the one without.
        """
        try:
            torch.zeros(1, device=device).cpu()
        except (RuntimeError, AssertionError) as error:
            raise EngineError(
                f"engine torch cannot use the device {device!r} ({first_line(error)}); expected cpu or cuda"
            ) from error
        self.contract, self.device = cast("Contract", contract), device
        self._called = contract = contract.without_adapters if known is None else contract
        self._with_adapters = cache(partial(self._open_adapted, graph, compiled))
        # Full capacity is cheap on a GPU, and compiled code would be compiled anew for every length.
        self.static_capacity = self.reads_prefixes = compiled or torch.device(device).type != "cpu"
        read = read_graph(graph)
        contract.check(str(graph), read.inputs, read.outputs)
        refuse_unknown(str(graph), read.nodes)
        refuse_copied_cache(str(graph), contract, read.nodes)
        has_kernels = torch.device(device).type in WITH_KERNELS and find_spec("triton") is not None
        self._with_kernels = has_kernels or weightless
        folded = fold(read, kept(read) if self._with_kernels else ())
        rewriting = Rewriting(*folded, contract, "meta" if weightless else device, read.four_bits)
        self.fused = fuse(rewriting, compiled, self._with_kernels)
        self._nodes = self._nodes_of_few = rewriting.in_order()
        if fired := fuse(rewriting, compiled, self._with_kernels, few=True):
            self.fused |= fired
            self._nodes_of_few = rewriting.in_order()
        self.reads_live = self._with_kernels and reads_live(self._nodes, contract)
        constants = rewriting.constants | dict(known or {})
        self._constants = place(constants, [*self._nodes, *self._nodes_of_few], device)
        self._module = lru_cache(KEPT_SHAPES)(self._convert)
        self._compiled_step = lru_cache(KEPT_SHAPES)(self._compile)
        self._kept_code = KeptCode(graph) if compiled else None
        self._over: list[TorchEngine] = []  # engines over the same constants
        self._computed = [spec for spec in contract.outputs if spec.name not in contract.aliases]
        if not isinstance(contract, VisionContract):  # whose sizes must fit each other
            trial = self._convert(TRIAL)  # refuse now what cannot be converted
            self.logits_dtype = trial.meta.get(LOGITS, Engine.logits_dtype)

    def prefill_widths(self, tokens: int) -> list[int]:
        """Use powers of two, the largest first: a prompt may have any width, and not each is worth a conversion."""
        return [width for chunk in chunks(tokens, PREFILL_WIDTH) for width in _powers_of_two(chunk)]

    def step(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Step:
        if ADAPTER in inputs and self._called is not self.contract:
            return self._with_adapters().step(inputs, outputs)
        sizes = self._called.sizes({**inputs, **outputs})
        shape = tuple(sorted(sizes.items()))
        module = self.converted(sizes)
        given = [inputs[spec.name] for spec in self._called.inputs]
        wanted = [outputs[spec.name] for spec in self._computed]
        compute: Callable[..., object] = module
        ran = False

        def run() -> None:
            nonlocal compute, ran
            try:
                with torch.inference_mode():
                    if self._kept_code is not None and ran and compute is module:
                        # A step that repeats belongs to a round; prefill steps run too seldom to compile.
                        compute = self._compiled_step(shape, layout([*given, *wanted]))
                    compute(*given, *wanted)
                ran = True
            except torch.OutOfMemoryError:  # the decoder opened all models and says how much they need
                raise
            except (RuntimeError, IndexError) as error:
                raise EngineError(f"torch failed at {in_words(sizes)}: {first_line(error)}") from error

        return Step(inputs, outputs, run)

    def step_bytes(self, rows: int, capacity: int) -> int:
        """Return what the parts of attention take; each layer's take the memory of those before."""
        if not any(node.op == "trt_spec::Attention" for node in self._nodes):
            return 0
        size = max(state.shape[-1] for state in self.contract.of_kind(TOKEN))
        return most_bytes(rows, self.contract.heads, capacity, size)

    def over(self, change: Callable[[Sequence[Node]], list[Node]]) -> "TorchEngine":
        """Return an engine over the same constants, whose nodes are others; it is closed with this one."""
        other = copy(self)
        other._nodes, other._nodes_of_few = change(self._nodes), change(self._nodes_of_few)
        other._module = lru_cache(KEPT_SHAPES)(other._convert)
        other._compiled_step = lru_cache(KEPT_SHAPES)(other._compile)
        other._with_adapters = cache(lambda: self._with_adapters().over(change))
        self._over.append(other)
        return other

    def capturable(self) -> bool:
        return torch.device(self.device).type == "cuda"

    def converted(self, sizes: Mapping[str, int]) -> fx.GraphModule:
        """Return the graph as the operations of a step of these sizes, over its inputs and the outputs it computes."""
        return self._module(tuple(sorted(sizes.items())))

    def _open_adapted(self, graph: Path, compiled: bool) -> "TorchEngine":
        """Open the graph with room for adapters, over the same constants."""
        beside = graph.with_name(ADAPTED + graph.name)
        return TorchEngine(beside, self.contract, self.device, compiled, known=self._constants)

    def open_adapters(self) -> None:
        self._with_adapters()

    def close(self) -> None:
        if self._with_adapters.cache_info().currsize:
            self._with_adapters().close()
        self._with_adapters.cache_clear()
        for one in (self, *self._over):
            one._constants = {}
            one._module.cache_clear()
            one._compiled_step.cache_clear()
        if self._kept_code is not None:
            self._kept_code.close()

    def _compile(self, shape: Sizes, _: object) -> CompiledStep:
        assert self._kept_code is not None
        return CompiledStep(self._module(shape), self._kept_code)

    def _convert(self, shape: Sizes) -> fx.GraphModule:
        """Convert the graph for these sizes; it writes to all of the caller's outputs, and to the cache in place."""
        sizes = dict(shape)
        recorder = Recorder(self.device)
        values = dict(self._constants)
        for spec in self._called.inputs:
            values[spec.name] = recorder.input(spec, sizes)
        places = {spec.name: recorder.input(spec, sizes) for spec in self._computed}
        values |= {PLACE.format(name): place for name, place in places.items()}
        few = "width" in sizes and sizes["batch"] * sizes["width"] <= FEW_ROWS
        with recorder, composed(not self._with_kernels):
            for node in self._nodes_of_few if few else self._nodes:
                run_node(node, values)
            for name, place in places.items():
                if values[name] is not place:
                    place.copy_(values[name])
        module = recorder.module()
        if last := next((node for node in self._nodes if node.op == WIDENS and LOGITS in node.outputs), None):
            module.meta[LOGITS] = str(values[last.inputs[0]].dtype).removeprefix("torch.")
        return module


def _powers_of_two(width: int) -> list[int]:
    return [1 << bit for bit in reversed(range(width.bit_length())) if width >> bit & 1]
