"""Runs TensorRT plans on torch's memory and stream; `tensorrt` and `tensorrt_rtx` share one code path."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..contract import ALIGNMENT, MAX_DRAFT_LENGTH, Contract
from ..engine import Engine, Step, chunks
from ..errors import EngineError
from ..steps import line
from .choice import choose_plans, compute_capability
from .contexts import Context, OpenedPlan
from .library import RuntimeLibrary


def open_engines(
    name: str, models: Sequence[tuple[Path, Contract]], device: str, exact_weights: bool, alone: bool
) -> "list[TensorRTEngine]":
    """Open the models' plans for this GPU. All share one scratch memory, because they take turns on one stream."""
    capability = compute_capability(device)
    chosen = [choose_plans(models[0][0], capability)]
    library_name = chosen[0][0].key.engine
    chosen += [choose_plans(graph, capability, library_name) for graph, _ in models[1:]]
    library = RuntimeLibrary(library_name)
    opened: list[list[OpenedPlan]] = []
    for (graph, contract), plans in zip(models, chosen, strict=True):
        opened.append([OpenedPlan(library, graph.parents[1], plan, contract) for plan in plans])
    size = max(plan.scratch_bytes for plans in opened for plan in plans)
    try:
        scratch = torch.empty(size, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        weights = sum(plan.bytes for plans in chosen for plan in plans)
        raise EngineError(
            f"no memory for a workspace of {size / 2**20:,.0f} MiB beside plans of {weights / 2**20:,.0f} MiB; build "
            "fewer or narrower plans, or for smaller batches"
        ) from error
    return [
        TensorRTEngine(contract, device, plans, scratch) for (_, contract), plans in zip(models, opened, strict=True)
    ]


class TensorRTEngine(Engine):
    """Plans of one model. A step is padded to the narrowest plan that holds it, and the padding is written after it.

    Each plan has a context for each batch, whose shapes never change, so that recordings of it stay valid.
    """

    static_capacity = True
    takes_tails = False  # plans are compiled for calls of one size

    def __init__(self, contract: Contract, device: str, plans: list[OpenedPlan], scratch: Tensor) -> None:
        self.contract, self.device = contract, device
        self._plans, self._scratch = plans, scratch
        self.verify_width = max(plan.key.rows for plan in plans)
        self._contexts: dict[tuple[OpenedPlan, int], Context] = {}

    def reserve(self, rows: int, capacity: int) -> None:
        for key in (plan.key for plan in self._plans):
            if capacity != key.capacity:
                raise EngineError(
                    f"a plan of {key.model} is for caches of {key.capacity} tokens, this one has {capacity}; compile "
                    "it again with trt-spec build"
                )
        fitting = [[plan for plan in self._plans if plan.fits(batch, 1, 1)] for batch in range(1, rows + 1)]
        for batch, plans in enumerate(fitting, 1):
            if not plans:
                raise self._no_plan(batch, 1, 1)
        self.verify_width = min(max(plan.key.rows for plan in plans) for plans in fitting)
        self.read_width = min(max(plan.key.width for plan in plans) for plans in fitting)

    def prefill_widths(self, tokens: int) -> list[int]:
        return chunks(tokens, max((plan.key.width for plan in self._plans if plan.key.batch[0] == 1), default=1))

    def step(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Step:
        sizes = self.contract.sizes({**inputs, **outputs})
        context = self._context_for(sizes["batch"], sizes["width"], sizes["rows"])
        before, after = [], []  # copies into wider tensors, and out of them
        bound: dict[str, Tensor] = {}
        # A token that is added after a step's must see at least itself, or its entries would be no numbers.
        wider = line(sizes["batch"], context.sizes["width"], self.device)
        for spec in (*self.contract.inputs, *self.contract.outputs):
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
        return all(context.capturable(stream) for context in self._contexts.values() if context.has_run)

    def close(self) -> None:
        self._contexts.clear()
        for plan in self._plans:
            plan.close()
        self._plans, self._scratch = [], torch.empty(0)

    def _context_for(self, batch: int, width: int, rows: int) -> Context:
        fitting = [plan for plan in self._plans if plan.fits(batch, width, rows)]
        if not fitting:
            raise self._no_plan(batch, width, rows)
        plan = min(fitting, key=lambda plan: (plan.key.width, plan.key.rows))
        if (plan, batch) not in self._contexts:
            self._contexts[plan, batch] = Context(plan, batch, self._scratch)
        return self._contexts[plan, batch]

    def _no_plan(self, batch: int, width: int, rows: int) -> EngineError:
        draft_length = f" --draft-length {min(rows - 1, MAX_DRAFT_LENGTH)}" if rows > 1 else ""
        if rows - 1 > MAX_DRAFT_LENGTH:
            draft_length += f" --siblings {rows - 1 - MAX_DRAFT_LENGTH}"
        return EngineError(
            f"no plan of {self._plans[0].key.model} runs {batch} rows of {width} tokens; compile one with "
            f"trt-spec build --batch 1..{batch}{draft_length}, or open the decoder with a smaller max_batch"
        )


def current_stream(device: str) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)
