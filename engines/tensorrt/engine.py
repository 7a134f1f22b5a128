"""Runs TensorRT plans on torch's memory and stream; `tensorrt` and `tensorrt_rtx` share one code path."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from ..contract import (
    ADAPTER,
    ALIGNMENT,
    MAX_DRAFT_LENGTH,
    WHOLE_IMAGES,
    AnyContract,
    Contract,
    VisionContract,
)
from ..engine import Engine, Step, chunks
from ..errors import EngineError
from ..steps import line
from .choice import choose_plans, compute_capability
from .contexts import Context, OpenedPlan
from .library import RuntimeLibrary
from .seeing import SeeingEngine


def open_engines(
    name: str, models: Sequence[tuple[Path, AnyContract]], device: str, exact_weights: bool, alone: bool
) -> Sequence[Engine]:
    """Open the models' plans for this GPU; a graph that sees is opened alone."""
    graph, contract = models[0]
    if isinstance(contract, Contract) and WHOLE_IMAGES in contract.capabilities:
        raise EngineError(
            f"{graph} reads all tokens of an image in one call, for which no plans are made; use engine onnxruntime or "
            "torch, or export without --images"
        )
    capability = compute_capability(device)
    if isinstance(contract, VisionContract):
        plan = choose_plans(graph, capability)[0]
        opened = OpenedPlan(RuntimeLibrary(plan.key.engine), graph.parents[1], plan, contract)
        return [SeeingEngine(contract, device, opened, current_stream)]
    return _open_models(cast("Sequence[tuple[Path, Contract]]", models), device, capability)


def _open_models(models: Sequence[tuple[Path, Contract]], device: str, capability: str) -> "list[TensorRTEngine]":
    """Open models that share one scratch memory, because they take turns on one stream."""
    chosen = [choose_plans(models[0][0], capability)]
    library_name = chosen[0][0].key.engine
    chosen += [choose_plans(graph, capability, library_name) for graph, _ in models[1:]]
    library = RuntimeLibrary(library_name)
    opened: list[list[OpenedPlan]] = []
    for (graph, contract), plans in zip(models, chosen, strict=True):
        own = contract.without_adapters
        opened.append([OpenedPlan(library, graph.parents[1], plan, own) for plan in plans])
    scratch = _scratch([plan for plans in opened for plan in plans], device)

    def adapted(graph: Path, contract: Contract) -> "TensorRTEngine":
        plans = choose_plans(graph, capability, library_name, adapted=True)
        beside = [OpenedPlan(library, graph.parents[1], plan, contract) for plan in plans]
        return TensorRTEngine(contract, device, beside, _scratch(beside, device))

    return [
        TensorRTEngine(contract, device, plans, scratch, partial(adapted, graph, contract))
        for (graph, contract), plans in zip(models, opened, strict=True)
    ]


def _scratch(plans: Sequence[OpenedPlan], device: str) -> Tensor:
    size = max(plan.scratch_bytes for plan in plans)
    try:
        return torch.empty(size, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        weights = sum(plan.bytes for plan in plans)
        raise EngineError(
            f"no memory for a workspace of {size / 2**20:,.0f} MiB beside plans of {weights / 2**20:,.0f} MiB; build "
            "fewer or narrower plans, or for smaller batches"
        ) from error


class TensorRTEngine(Engine):
    """Plans of one model. A step is padded to the narrowest plan that holds it, and the padding is written after it.

    Each plan has a context for each batch, and for each number of columns of adapters, whose shapes never change, so
    that recordings of it stay valid. Plans of the graph that has room for adapters are an engine of their own.
    """

    static_capacity = True
    takes_tails = False  # plans are compiled for calls of one size

    def __init__(
        self,
        contract: Contract,
        device: str,
        plans: list[OpenedPlan],
        scratch: Tensor,
        open_adapted: "Callable[[], TensorRTEngine] | None" = None,
    ) -> None:
        self.contract, self.device = contract, device
        self._called = contract if open_adapted is None else contract.without_adapters
        self._plans, self._scratch = plans, scratch
        self._open_adapted = open_adapted  # the engine of the other graph, with the first adapter
        self._adapted: TensorRTEngine | None = None
        self.verify_width = max(plan.key.rows for plan in plans)
        self._contexts: dict[tuple[OpenedPlan, tuple[int, ...]], Context] = {}
        self._runs: dict[tuple[int, int], bool] = {}  # asked in each round

    def reserve(self, rows: int, capacity: int) -> None:
        self._reserved = rows, capacity
        self._runs.clear()
        for key in (plan.key for plan in self._plans):
            if capacity != key.capacity:
                raise EngineError(
                    f"a plan of {key.model} is for caches of {key.capacity} tokens, this one has {capacity}; compile "
                    "it again with trt-spec build"
                )
        sizes = [{"batch": batch, "width": 1, "rows": 1} for batch in range(1, rows + 1)]
        fitting = [[plan for plan in self._plans if plan.fits(each)] for each in sizes]
        for each, plans in zip(sizes, fitting, strict=True):
            if not plans:
                raise self._no_plan(each)
        self.verify_width = min(max(plan.key.rows for plan in plans) for plans in fitting)
        self.read_width = min(max(plan.key.width for plan in plans) for plans in fitting)

    def runs(self, width: int, rows: int) -> bool:
        if (width, rows) not in self._runs:
            most, _ = self._reserved
            each = [{"batch": batch, "width": width, "rows": rows} for batch in range(1, most + 1)]
            self._runs[width, rows] = all(any(plan.fits(sizes) for plan in self._plans) for sizes in each)
        return self._runs[width, rows]

    def prefill_widths(self, tokens: int) -> list[int]:
        return chunks(tokens, max((plan.key.width for plan in self._plans if plan.key.batch[0] == 1), default=1))

    def step(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Step:
        if ADAPTER in inputs and self._open_adapted is not None:
            return self._with_adapters().step(inputs, outputs)
        sizes = self._called.sizes({**inputs, **outputs})
        context = self._context_for(sizes)
        before, after = [], []  # copies into wider tensors, and out of them
        bound: dict[str, Tensor] = {}
        # A token that is added after a step's must see at least itself, or its entries would be no numbers.
        wider = line(sizes["batch"], context.sizes["width"], self.device)
        for spec in (*self._called.inputs, *self._called.outputs):
            theirs = inputs[spec.name] if spec.name in inputs else outputs[spec.name]
            shape = [context.sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape]
            ours = theirs
            if list(theirs.shape) != shape or theirs.data_ptr() % ALIGNMENT:
                ours = wider.get(spec.name, torch.zeros(shape, dtype=theirs.dtype, device=self.device))
                part = ours[tuple(slice(size) for size in theirs.shape)]
                if spec.name in inputs:
                    before.append((part, theirs))
                else:
                    after.append((theirs, part))
            bound[spec.name] = ours
        for output, past in self.contract.aliases.items():
            assert bound[output].data_ptr() == bound[past].data_ptr(), f"{output} must be the memory of {past}"
        for name, tensor in bound.items():
            assert tensor.is_contiguous(), f"{name} must be contiguous"
        addresses = {name: tensor.data_ptr() for name, tensor in bound.items()}

        def run(tensors: object = bound) -> None:  # the default keeps their memory alive
            for part, theirs in before:
                part.copy_(theirs)
            context.run(addresses, current_stream(self.device))
            for theirs, part in after:
                theirs.copy_(part)

        return Step(inputs, outputs, run)

    def capturable(self) -> bool:
        stream = current_stream(self.device)
        own = all(context.capturable(stream) for context in self._contexts.values() if context.has_run)
        return own and (self._adapted is None or self._adapted.capturable())

    def open_adapters(self) -> None:
        self._with_adapters()

    def close(self) -> None:
        if self._adapted is not None:
            self._adapted.close()
        self._adapted = None
        self._contexts.clear()
        for plan in self._plans:
            plan.close()
        self._plans, self._scratch = [], torch.empty(0)

    def _context_for(self, sizes: Mapping[str, int]) -> Context:
        fitting = [plan for plan in self._plans if plan.fits(sizes)]
        if not fitting:
            raise self._no_plan(sizes)
        plan = min(fitting, key=lambda plan: (plan.key.width, plan.key.rows))
        free = {name: sizes[name] for name in plan.key.free}
        if (known := (plan, tuple(free.values()))) not in self._contexts:
            self._contexts[known] = Context(plan, free, self._scratch)
        return self._contexts[known]

    def _with_adapters(self) -> "TensorRTEngine":
        if self._adapted is None:
            assert self._open_adapted is not None
            opened = self._open_adapted()
            opened.reserve(*self._reserved)
            for key in (plan.key for plan in self._plans):
                if not any(plan.key.covers(key) for plan in opened._plans):
                    raise EngineError(
                        f"the plans of {key.model} with adapters run no {key.width} tokens at batch {key.batch[1]}, "
                        "those without do; compile both again with trt-spec build"
                    )
            self._adapted = opened
        return self._adapted

    def _no_plan(self, sizes: Mapping[str, int]) -> EngineError:
        batch, width, rows = (sizes[name] for name in ("batch", "width", "rows"))
        draft_length = f" --draft-length {min(rows - 1, MAX_DRAFT_LENGTH)}" if rows > 1 else ""
        if rows - 1 > MAX_DRAFT_LENGTH:
            draft_length += f" --siblings {rows - 1 - MAX_DRAFT_LENGTH}"
        return EngineError(
            f"no plan of {self._plans[0].key.model} runs {batch} rows of {width} tokens; compile one with "
            f"trt-spec build --batch 1..{batch}{draft_length}, or open the decoder with a smaller max_batch"
        )


def current_stream(device: str) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)
