"""TensorRT plans on torch's memory and stream: `tensorrt` and `tensorrt_rtx` by one code path."""

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .contract import Contract
from .engine import Step
from .errors import EngineError
from .plans import LIBRARIES, PLANS, Plan, graph_identity, read_plan

ALIGNMENT = 256  # bytes, which TensorRT wants of every address
BUILD = "trt-spec build --bundle {bundle} --engine {engine} --compute-capability {capability}"


def open_plans(models: Sequence[tuple[Path, Contract]], device: str) -> "list[TensorRTEngine]":
    """The models' plans for this GPU. All of them share one scratch memory: they take turns on one stream."""
    capability = compute_capability(device)
    chosen = [choose_plans(graph, capability) for graph, _ in models]
    library = _Library(chosen[0][0].key.engine)
    opened = [
        [_Context(library, graph.parents[1], plan, contract) for plan in plans]
        for (graph, contract), plans in zip(models, chosen, strict=True)
    ]
    size = max(context.scratch_bytes for contexts in opened for context in contexts)
    try:
        scratch = torch.empty(size, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        weights = sum(plan.bytes for plans in chosen for plan in plans)
        raise EngineError(
            f"no memory for a workspace of {size / 2**20:,.0f} MiB beside plans of {weights / 2**20:,.0f} MiB; build "
            "fewer or narrower plans, or for smaller batches"
        ) from error
    return [
        TensorRTEngine(contract, device, contexts, scratch)
        for (_, contract), contexts in zip(models, opened, strict=True)
    ]


def compute_capability(device: str) -> str:
    if not device.startswith("cuda"):
        raise EngineError(f"engine tensorrt runs on the device cuda, not on {device!r}")
    if not torch.cuda.is_available():
        raise EngineError("engine tensorrt needs a GPU, and torch sees none; trt-spec doctor says what is missing")
    return ".".join(map(str, torch.cuda.get_device_capability(device)))


def choose_plans(graph: Path, capability: str) -> list[Plan]:
    """The model's plans that run here, of one library; a stale or foreign one is refused with what mends it."""
    bundle, model = graph.parents[1], graph.parent.name
    plans = [plan for plan in map(read_plan, sorted((bundle / PLANS).glob("*/*.json"))) if plan.key.model == model]
    engine = plans[0].key.engine if plans else "tensorrt-rtx"
    mend = BUILD.format(bundle=bundle, engine=engine, capability=capability)
    if not plans:
        raise EngineError(f"bundle {bundle} has no plans for its {model}; compile them: {mend}")
    identity = graph_identity(bundle, model)
    if not (own := [plan for plan in plans if plan.key.graph == identity]):
        raise EngineError(f"the plans in {bundle} are of another export of its {model}; compile it again: {mend}")
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
        reasons.append(f"were compiled by {name} {others}, here is {version}; compile them again: {mend}")
    raise EngineError(f"the plans of {model} in {bundle} {reasons[0]}")


def one_of_each(plans: Sequence[Plan]) -> list[Plan]:
    """One plan for each shape of a step, as each holds the weights: that of the most batches, fused if there is one."""
    ordered = sorted(plans, key=lambda plan: (plan.key.batch[1], -plan.key.batch[0], not plan.key.unfused_attention))
    return list({(plan.key.width, plan.key.rows): plan for plan in ordered}.values())


class TensorRTEngine:
    """See `Engine`. A step runs in the narrowest plan that holds it, padded; its garbage lies behind what it wrote."""

    static_capacity = True

    def __init__(self, contract: Contract, device: str, contexts: "list[_Context]", scratch: Tensor) -> None:
        self.contract, self.device = contract, device
        self.verify_width = max(context.key.rows for context in contexts)
        self.prefill_width = max(context.key.width for context in contexts)
        self._contexts, self._scratch = contexts, scratch
        for context in contexts:
            context.use_scratch(scratch)
        self._cache: Mapping[str, Tensor] = {}

    def bind(self, cache: Mapping[str, Tensor]) -> None:
        rows, _, capacity, _ = next(iter(cache.values())).shape
        for context in self._contexts:
            key = context.key
            if capacity != key.capacity:
                raise EngineError(
                    f"a plan of {key.model} is for caches of {key.capacity} tokens, this one has {capacity}; compile "
                    "it again with trt-spec build"
                )
        for batch in range(1, rows + 1):
            self._context_for(batch, 1, 1)
        self._cache = cache

    def step(self, first_row: int, input_ids: Tensor, start: Tensor, logits: Tensor) -> Step:
        (batch, width), rows = input_ids.shape, logits.shape[1]
        context = self._context_for(batch, width, rows)
        key, device = context.key, self.device
        ids, scores = input_ids, logits
        if width < key.width or input_ids.data_ptr() % ALIGNMENT:
            ids = torch.zeros(batch, key.width, dtype=torch.int64, device=device)
        if rows < key.rows:
            scores = torch.zeros(batch, key.rows, self.contract.vocab_size, device=device)
        last_rows = logit_rows(batch, width - rows, width, key.rows, device)
        tensors = {"input_ids": ids, "start": start, "logit_rows": last_rows, "logits": scores}
        for name, buffer in self._cache.items():
            tensors[f"past_{name}"] = tensors[f"present_{name}"] = buffer[first_row : first_row + batch]
        addresses = {}
        for name, tensor in tensors.items():
            assert tensor.is_contiguous(), f"{name} must be contiguous"
            assert tensor.data_ptr() % ALIGNMENT == 0, f"{name} must be aligned to {ALIGNMENT} bytes"
            addresses[name] = tensor.data_ptr()

        def run(tensors: object = tensors) -> None:  # it keeps their memory alive
            if ids is not input_ids:
                ids[:, :width].copy_(input_ids)
            context.run(batch, addresses, current_stream(device))
            if scores is not logits:
                logits.copy_(scores[:, :rows])

        return Step(input_ids, start, logits, run)

    def capturable(self) -> bool:
        stream = current_stream(self.device)
        return all(context.capturable(stream) for context in self._contexts)

    def close(self) -> None:
        for context in self._contexts:
            context.close()
        self._contexts, self._cache = [], {}

    def _context_for(self, batch: int, width: int, rows: int) -> "_Context":
        fitting = [context for context in self._contexts if context.fits(batch, width, rows)]
        if not fitting:
            key = self._contexts[0].key
            raise EngineError(
                f"no plan of {key.model} runs {batch} rows of {width} tokens; compile one with trt-spec build --batch "
                f"1..{batch}{f' --draft-length {rows - 1}' if rows > 1 else ''}, or open the decoder with less"
            )
        return min(fitting, key=lambda context: (context.key.width, context.key.rows))


@cache
def logit_rows(batch: int, first: int, end: int, count: int, device: str) -> Tensor:
    """`count` rows [B, R] from `first` on, the last one again where they end: the same memory for all such steps."""
    return torch.arange(first, first + count, device=device).clamp_(max=end - 1).repeat(batch, 1)


def current_stream(device: str) -> int:
    return int(torch.cuda.current_stream(device).cuda_stream)


class _Context:
    """One plan, opened, with the one context it runs in; what is bound stays bound until another step needs more."""

    def __init__(self, library: "_Library", bundle: Path, plan: Plan, contract: Contract) -> None:
        self.key = plan.key
        self._contract, self._complaints = contract, library.complaints
        self._file = bundle / plan.key.path
        content = self._file.read_bytes()
        if hashlib.sha256(content).hexdigest() != plan.sha256:
            raise EngineError(f"{self._file} is damaged; delete it and compile it again with trt-spec build")
        self._engine = library.runtime.deserialize_cuda_engine(content)
        if self._engine is None:
            raise EngineError(f"{plan.key.engine} {plan.key.version} cannot open {self._file}: {self._reason()}")
        for output, past in contract.aliases.items():
            if (found := self._engine.get_aliased_input_tensor(output)) != past:
                raise EngineError(f"{self._file} has {output} in the memory of {found!r}, expected {past!r}")
        self.scratch_bytes = int(self._engine.device_memory_size_v2)
        self._runtime_cache, settings = library.settings(self._engine, self._cache_file)
        self._context = self._engine.create_execution_context(settings)
        if self._context is None:
            raise EngineError(f"{self._file} takes {plan.bytes / 2**20:,.0f} MiB and cannot run: {self._reason()}")
        self._batch = 0
        self._bound: dict[str, int] = {}

    @property
    def _cache_file(self) -> Path:
        return self._file.with_suffix(".cache")

    def use_scratch(self, scratch: Tensor) -> None:
        self._context.set_device_memory(scratch.data_ptr(), scratch.numel())

    def fits(self, batch: int, width: int, rows: int) -> bool:
        smallest, largest = self.key.batch
        return smallest <= batch <= largest and width <= self.key.width and rows <= self.key.rows

    def run(self, batch: int, addresses: Mapping[str, int], stream: int) -> None:
        done = batch == self._batch or self._set_shapes(batch)
        for name, address in addresses.items():
            if self._bound.get(name) != address:
                done = self._context.set_tensor_address(name, address) and done
                self._bound[name] = address
        if not (done and self._context.execute_async_v3(stream)):
            self._batch, self._bound = 0, {}
            raise EngineError(f"{self.key.engine} failed at batch {batch}, width {self.key.width}: {self._reason()}")

    def _set_shapes(self, batch: int) -> bool:
        self._batch = batch
        sizes = {"batch": batch} | self.key.sizes
        return all(
            self._context.set_input_shape(spec.name, tuple(sizes.get(str(dim), dim) for dim in spec.shape))
            for spec in self._contract.inputs
        )

    def capturable(self, stream: int) -> bool:
        asked = getattr(self._context, "is_stream_capturable", None)  # tensorrt's always are
        return asked is None or bool(asked(stream))

    def close(self) -> None:
        """Keep what the library has compiled since, if it does."""
        if self._runtime_cache is not None:
            try:
                self._cache_file.write_bytes(self._runtime_cache.serialize())
            except OSError as error:
                warnings.warn(f"the runtime cache {self._cache_file} was not kept: {error.strerror}", stacklevel=2)
        self._context = self._engine = self._runtime_cache = None

    def _reason(self) -> str:
        return self._complaints[-1] if self._complaints else "no reason given"


class _Library:
    """What differs between the two libraries."""

    def __init__(self, engine: str) -> None:
        self.trt: Any = import_module(LIBRARIES[engine])
        self.complaints: list[str] = []  # the latest last
        self.runtime: Any = self.trt.Runtime(_logger(self.trt, self.complaints))

    def settings(self, engine: Any, cache_file: Path) -> tuple[Any, Any]:
        """A cache of kernels compiled at run time, which only RTX has, and the configuration of a context."""
        settings = engine.create_runtime_config()
        settings.set_execution_context_allocation_strategy(self.trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if not hasattr(settings, "create_runtime_cache"):
            return None, settings
        cache = settings.create_runtime_cache()
        if cache_file.exists():
            cache.deserialize(cache_file.read_bytes())  # of another driver or GPU it is refused, and made anew
        settings.set_runtime_cache(cache)
        return cache, settings


def _logger(trt: Any, complaints: list[str]) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]  # an untyped base
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                complaints.append(next(iter(message.splitlines()), "no reason given"))

    return Logger()
