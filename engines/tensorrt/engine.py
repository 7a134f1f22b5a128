"""Runs TensorRT plans on torch's memory and stream; `tensorrt` and `tensorrt_rtx` share one code path."""

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..bundle import PLANS, graph_identity
from ..bundle.whole_files import write_whole
from ..contract import ALIGNMENT, MAX_DRAFT_LENGTH, Contract
from ..engine import Step, chunks, line
from ..errors import EngineError
from .library import LIBRARIES, RuntimeLibrary, capability_of
from .plans import CompiledPlan, read_plan

BUILD = "trt-spec build --bundle {bundle} --engine {engine} --compute-capability {capability}"


def open_engines(
    name: str, models: Sequence[tuple[Path, Contract]], device: str, exact_weights: bool, alone: bool
) -> "list[TensorRTEngine]":
    """Open the models' plans for this GPU. All share one scratch memory, because they take turns on one stream."""
    capability = compute_capability(device)
    chosen = [choose_plans(models[0][0], capability)]
    library_name = chosen[0][0].key.engine
    chosen += [choose_plans(graph, capability, library_name) for graph, _ in models[1:]]
    library = RuntimeLibrary(library_name)
    opened: list[list[_Opened]] = []
    for (graph, contract), plans in zip(models, chosen, strict=True):
        opened.append([_Opened(library, graph.parents[1], plan, contract) for plan in plans])
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


def compute_capability(device: str) -> str:
    if not device.startswith("cuda"):
        raise EngineError(f"engine tensorrt runs on the device cuda, not on {device!r}; name cuda")
    if not torch.cuda.is_available():
        raise EngineError("engine tensorrt needs a GPU, and torch sees none; trt-spec doctor says what is missing")
    return capability_of(device)


def choose_plans(graph: Path, capability: str, engine: str | None = None) -> list[CompiledPlan]:
    """Return the model's plans that run here, all of one library; refuse stale or foreign ones and say what to do."""
    bundle, model = graph.parents[1], graph.parent.name
    plans = [plan for plan in map(read_plan, sorted((bundle / PLANS).glob("*/*.json"))) if plan.key.model == model]
    plans = [plan for plan in plans if engine in (None, plan.key.engine)]
    engine = plans[0].key.engine if plans else engine or "tensorrt-rtx"
    mend = BUILD.format(bundle=bundle, engine=engine, capability=capability)
    if not plans:
        raise EngineError(f"bundle {bundle} has no plans for its {model}; compile them: {mend}")
    identity = graph_identity(bundle, model)
    if not (own := [plan for plan in plans if plan.key.graph == identity]):
        raise EngineError(f"the plans in {bundle} are from another export of its {model}; compile them again: {mend}")
    if not (fitting := [plan for plan in own if plan.key.compute_capability == capability]):
        others = ", ".join(sorted({plan.key.compute_capability for plan in own}, key=float))
        raise EngineError(
            f"the plans of {model} in {bundle} are for GPUs of compute capability {others}, the one here has "
            f"{capability}; compile them: {mend}"
        )
    reasons = []
    for name in (name for name in LIBRARIES if any(plan.key.engine == name for plan in fitting)):
        try:
            version = import_module(LIBRARIES[name]).__version__
        except ImportError:
            reasons.append(f"need {name}, which is not installed; pip install 'trt-spec[{name}]'")
            continue
        if current := [plan for plan in fitting if (plan.key.engine, plan.key.version) == (name, version)]:
            return one_of_each(current)
        others = ", ".join(sorted({plan.key.version for plan in fitting if plan.key.engine == name}))
        reasons.append(f"were compiled by {name} {others}, but {version} is installed; compile them again: {mend}")
    raise EngineError(f"the plans of {model} in {bundle} {reasons[0]}")


def one_of_each(plans: Sequence[CompiledPlan]) -> list[CompiledPlan]:
    """Drop each plan whose steps another one also runs, fused or for more batches: every plan holds all weights."""
    ordered = sorted(plans, key=lambda plan: (plan.key.unfused_attention, plan.key.batch[0] - plan.key.batch[1]))
    kept: list[CompiledPlan] = []
    for key, plan in ((plan.key, plan) for plan in ordered):
        same = [other.key.batch for other in kept if (other.key.width, other.key.rows) == (key.width, key.rows)]
        if not any(smallest <= key.batch[0] and key.batch[1] <= largest for smallest, largest in same):
            kept.append(plan)
    return kept


class TensorRTEngine:
    """See `Engine`. A step is padded to the narrowest plan that holds it; the garbage lies behind what it wrote.

    Each plan has a context for each batch, whose shapes never change, so that recordings of it stay valid.
    """

    static_capacity = takes_trees = True
    reads_prefixes = own_threads = reads_together = False

    def __init__(self, contract: Contract, device: str, plans: "list[_Opened]", scratch: Tensor) -> None:
        self.contract, self.device = contract, device
        self._plans, self._scratch = plans, scratch
        self.verify_width = max(plan.key.rows for plan in plans)
        self._contexts: dict[tuple[_Opened, int], _Context] = {}

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

    def prefill_widths(self, tokens: int) -> list[int]:
        return chunks(tokens, max((plan.key.width for plan in self._plans if plan.key.batch[0] == 1), default=1))

    def step(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Step:
        sizes = self.contract.sizes({**inputs, **outputs})
        context = self._context_for(sizes["batch"], sizes["width"], sizes["rows"])
        before, after = [], []  # copies into wider tensors, and out of them
        bound: dict[str, Tensor] = {}
        # What is added behind a step's tokens must see something, itself at least, or its entries were no numbers.
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

    def settle(self) -> None: ...

    def close(self) -> None:
        self._contexts.clear()
        for plan in self._plans:
            plan.close()
        self._plans, self._scratch = [], torch.empty(0)

    def _context_for(self, batch: int, width: int, rows: int) -> "_Context":
        fitting = [plan for plan in self._plans if plan.fits(batch, width, rows)]
        if not fitting:
            raise self._no_plan(batch, width, rows)
        plan = min(fitting, key=lambda plan: (plan.key.width, plan.key.rows))
        if (plan, batch) not in self._contexts:
            self._contexts[plan, batch] = _Context(plan, batch, self._scratch)
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


class _Opened:
    """One plan with its weights on the GPU."""

    def __init__(self, library: RuntimeLibrary, bundle: Path, plan: CompiledPlan, contract: Contract) -> None:
        self.key, self.contract = plan.key, contract
        self._library, self._file = library, bundle / plan.key.path
        try:
            content = self._file.read_bytes()
        except OSError as error:
            raise EngineError(f"{self._file} cannot be read ({error.strerror}); make it readable") from error
        if hashlib.sha256(content).hexdigest() != plan.sha256:
            raise EngineError(f"{self._file} is damaged; delete it and compile it again with trt-spec build")
        self.engine = library.runtime.deserialize_cuda_engine(content)
        if self.engine is None:
            raise EngineError(
                f"{plan.key.engine} {plan.key.version} cannot open {self._file}, which takes "
                f"{plan.bytes / 2**20:,.0f} MiB: {self.reason()}; compile it again, or make room on the GPU"
            )
        for output, past in contract.aliases.items():
            if (found := self.engine.get_aliased_input_tensor(output)) != past:
                raise EngineError(
                    f"{self._file} has {output} in the memory of {found!r}, expected {past!r}; please report it"
                )
        self.scratch_bytes = int(self.engine.device_memory_size_v2)
        self._runtime_cache, self._settings = library.settings(self.engine, self._cache_file)

    @property
    def _cache_file(self) -> Path:
        return self._file.with_suffix(".cache")

    def fits(self, batch: int, width: int, rows: int) -> bool:
        smallest, largest = self.key.batch
        return smallest <= batch <= largest and width <= self.key.width and rows <= self.key.rows

    def new_context(self) -> Any:
        context = self.engine.create_execution_context(self._settings)
        if context is None:
            raise EngineError(f"{self._file} cannot run: {self.reason()}; make room on the GPU")
        return context

    def close(self) -> None:
        """Free the plan, after saving what the library has compiled since, if it keeps that."""
        if self._runtime_cache is not None:
            try:
                write_whole(self._cache_file, self._runtime_cache.serialize())
            except OSError as error:
                warnings.warn(f"the runtime cache {self._cache_file} cannot be saved: {error.strerror}", stacklevel=2)
        self.engine = self._runtime_cache = self._settings = None

    def reason(self) -> str:
        return self._library.complaints[-1] if self._library.complaints else "no reason given"


class _Context:
    """A plan at one batch; tensors stay bound until a step needs other memory."""

    def __init__(self, plan: _Opened, batch: int, scratch: Tensor) -> None:
        self.key, self._plan, self._batch = plan.key, plan, batch
        self._context = plan.new_context()
        self._context.set_device_memory(scratch.data_ptr(), scratch.numel())
        self.sizes = {"batch": batch} | plan.key.sizes
        for spec in plan.contract.inputs:
            shape = tuple(self.sizes.get(str(dim), dim) for dim in spec.shape)
            if not self._context.set_input_shape(spec.name, shape):
                raise EngineError(
                    f"a plan of {plan.key.model} refuses {spec.name} {shape}: {plan.reason()}; build it again"
                )
        self.has_run = False
        self._bound: dict[str, int] = {}

    def run(self, addresses: Mapping[str, int], stream: int) -> None:
        done = True
        for name, address in addresses.items():
            if self._bound.get(name) != address:
                done = self._context.set_tensor_address(name, address) and done
                self._bound[name] = address
        if not (done and self._context.execute_async_v3(stream)):
            self._bound = {}
            raise EngineError(
                f"{self.key.engine} failed at batch {self._batch}, width {self.key.width}: {self._plan.reason()}"
            )
        self.has_run = True

    def capturable(self, stream: int) -> bool:
        asked = getattr(self._context, "is_stream_capturable", None)  # contexts of tensorrt always are
        return asked is None or bool(asked(stream))
