"""A stand-in for `tensorrt` and `tensorrt_rtx` without a GPU: it enforces their rules, and computes in ONNX Runtime.

Its plans are small files that name a graph. Every call is recorded; a broken rule is answered as the libraries answer.
"""

import ctypes
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from trt_spec.engines import Bundle, Contract, VisionContract
from trt_spec.engines.bundle import TARGET, VISION, graph_identity
from trt_spec.engines.onnxruntime import Threads, open_session
from trt_spec.engines.tensorrt import CompiledPlan, PlanKey
from trt_spec.engines.tensorrt import engine as tensorrt
from trt_spec.export.plans.roles import SEE, BuildOptions, roles, with_more_of_target
from trt_spec.export.plans.seeing import ranges_of_images

ALIGNMENT = 64  # what torch gives on the CPU
SCRATCH = 1000  # bytes
CTYPES = {"int64": ctypes.c_int64, "float32": ctypes.c_float}
NUMPY = {"bool": np.bool_, "int64": np.int64, "float32": np.float32}


def write_plans(path: Path, version: str = "1", capability: str = "8.9", **options: Any) -> list[CompiledPlan]:
    """What `trt-spec build` would have written."""
    bundle = Bundle.open(path)
    settings = BuildOptions("tensorrt-rtx", [capability], **{"draft_length": 3, "prefill_width": 8} | options)
    plans = []
    heads = {name: bundle.models[name].contract for name in bundle.heads}
    masks = {name: own for name, model in bundle.models.items() if (own := model.masks) is not None}
    drafts = [*bundle.drafts, *filter(None, [bundle.foreign])]
    found = with_more_of_target(roles(settings, drafts, heads, masks), bundle.target.contract)
    if bundle.vision is not None:
        found.append(replace(SEE, ranges=ranges_of_images(path, bundle.vision.contract)))
    for role in found:
        key = PlanKey(
            role.model,
            "",
            "tensorrt-rtx",
            version,
            capability,
            role.width,
            role.rows,
            role.batch,
            bundle.capacity,
            unfused_attention=settings.unfused_attention,
            ranges=role.ranges,
        )
        key = replace(key, graph=graph_identity(path, role.model, key.file))
        contract = bundle.vision.contract if role is found[-1] and bundle.vision else bundle.models[role.model].contract
        contract = contract if key.adapted else contract.without_adapters
        graph = str(bundle.graph(role.model).with_name(key.file))
        content = json.dumps({"graph": graph, "key": asdict(key), "contract": contract.to_json()})
        file = path / key.path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        described = ([str(spec) for spec in specs] for specs in (contract.inputs, contract.outputs))
        digest = sha256(content.encode()).hexdigest()
        plan = CompiledPlan(key, role.name, len(content), digest, 0.0, {}, *described, dict(contract.aliases))
        file.with_suffix(".json").write_text(plan.to_json())
        plans.append(plan)
    return plans


def installed(library: "FakeTensorRT") -> "Iterator[FakeTensorRT]":
    """As tensorrt_rtx, on a GPU of compute capability 8.9 whose memory is the CPU's."""
    with (
        patch.dict(sys.modules, {"tensorrt_rtx": library}),
        patch.object(tensorrt, "compute_capability", lambda device: "8.9"),
        patch.object(tensorrt, "current_stream", lambda device: library.stream),
        patch.object(tensorrt, "ALIGNMENT", ALIGNMENT),
    ):
        yield library


class FakeTensorRT:
    """The module. `has_runtime_cache` as tensorrt_rtx, without as tensorrt."""

    class ILogger:
        INTERNAL_ERROR, ERROR, WARNING = "internal error", "error", "warning"

    class DynamicShapesKernelSpecializationStrategy:
        LAZY, EAGER = "lazy", "eager"

    class ExecutionContextAllocationStrategy:
        USER_MANAGED = "user managed"

    def __init__(self, version: str = "1", *, has_runtime_cache: bool = True) -> None:
        self.__version__ = version
        self.has_runtime_cache = has_runtime_cache
        self.kernels = "eager" if has_runtime_cache else "lazy"
        self.stream = 7
        self.calls: Counter[str] = Counter()
        self.runs: list[tuple[str, int, int]] = []  # model, width and batch
        self.columns: list[int] = []  # of adapters, in each run of the target
        self.rejected_caches = 0

    def Runtime(self, logger: Any) -> "Runtime":  # their name
        return Runtime(self, logger)


class Runtime:
    def __init__(self, library: FakeTensorRT, logger: Any) -> None:
        self._library, self._logger = library, logger

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> "ICudaEngine | None":
        self._library.calls["deserialize_cuda_engine"] += 1
        try:
            fields = json.loads(serialized_engine)
        except ValueError:
            self._logger.log(FakeTensorRT.ILogger.ERROR, "the plan has a bad magic tag\nmore")
            return None
        return ICudaEngine(self._library, self._logger, fields)


class ICudaEngine:
    device_memory_size_v2 = SCRATCH

    def __init__(self, library: FakeTensorRT, logger: Any, fields: dict[str, Any]) -> None:
        self.library, self.logger = library, logger
        self.key = PlanKey.from_json(fields["key"])
        kind = VisionContract if self.key.model == VISION else Contract
        self.contract: Any = kind.from_json(fields["contract"])
        self.session = open_session(Path(fields["graph"]), Threads(1, stay_awake=False))

    def get_aliased_input_tensor(self, name: str) -> str:
        return self.contract.aliases.get(name, "")

    def create_runtime_config(self) -> "IRuntimeConfig":
        return (IRuntimeConfigRTX if self.library.has_runtime_cache else IRuntimeConfig)(self.library)

    def create_execution_context(self, runtime_config: "IRuntimeConfig") -> "IExecutionContext":
        self.library.calls["create_execution_context"] += 1
        assert runtime_config.strategy == FakeTensorRT.ExecutionContextAllocationStrategy.USER_MANAGED
        assert runtime_config.dynamic_shapes_kernel_specialization_strategy == self.library.kernels
        return (IExecutionContextRTX if self.library.has_runtime_cache else IExecutionContext)(self)


class IRuntimeConfig:
    dynamic_shapes_kernel_specialization_strategy = "lazy"

    def __init__(self, library: FakeTensorRT) -> None:
        self.library, self.strategy = library, ""

    def set_execution_context_allocation_strategy(self, strategy: str) -> None:
        self.strategy = strategy


class IRuntimeCache:
    def __init__(self, library: FakeTensorRT) -> None:
        self._library, self._content = library, b"nothing"

    def deserialize(self, blob: bytes) -> bool:
        if blob == b"kernels":
            self._content = blob
        else:
            self._library.rejected_caches += 1
        return blob == b"kernels"

    def serialize(self) -> bytes:
        return b"kernels"


class IRuntimeConfigRTX(IRuntimeConfig):
    def create_runtime_cache(self) -> IRuntimeCache:
        return IRuntimeCache(self.library)

    def set_runtime_cache(self, cache: IRuntimeCache) -> bool:
        return True


class IExecutionContext:
    """Refuses what TensorRT refuses: unknown names, shapes outside the profile, addresses that are missing or apart.

    And a token that sees nothing, to which TensorRT gives no numbers, and one after the cache, which it writes all the
    same.
    """

    def __init__(self, engine: ICudaEngine) -> None:
        self._engine, self._contract, self._key = engine, engine.contract, engine.key
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._scratch = (0, 0)

    def set_device_memory(self, memory: int, size: int) -> None:
        self._scratch = memory, size

    def update_device_memory_size_for_shapes(self) -> int:
        """As it stands: of shapes that are not set no size is known."""
        return SCRATCH if len(self._shapes) == len(self._contract.inputs) else 0

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        self._engine.library.calls["set_input_shape"] += 1
        spec = next((spec for spec in self._contract.inputs if spec.name == name), None)
        if spec is None:
            return self._refuse(f"no input {name}")
        ranges = self._key.free | {symbol: (size, size) for symbol, size in self._key.sizes.items()}
        for dim, size in zip(spec.shape, shape, strict=True):
            least, most = ranges[dim] if isinstance(dim, str) else (dim, dim)
            if not least <= size <= most:
                return self._refuse(f"shape {shape} of {name} is outside the profile")
        self._shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._engine.library.calls["set_tensor_address"] += 1
        if name not in {spec.name for spec in (*self._contract.inputs, *self._contract.outputs)}:
            return self._refuse(f"no tensor {name}")
        if memory % ALIGNMENT:
            return self._refuse(f"the address of {name} is not aligned")
        self._addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        specs = (*self._contract.inputs, *self._contract.outputs)
        if stream_handle != self._engine.library.stream:
            return self._refuse("another stream")
        if self._scratch[0] == 0 or self._scratch[1] < SCRATCH:
            return self._refuse("no memory to work in")
        if missing := [spec.name for spec in self._contract.inputs if spec.name not in self._shapes]:
            return self._refuse(f"the shape of {missing[0]} is not set")
        if missing := [spec.name for spec in specs if spec.name not in self._addresses]:
            return self._refuse(f"the address of {missing[0]} is not set")
        for output, past in self._contract.aliases.items():
            if self._addresses[output] != self._addresses[past]:
                return self._refuse(f"{output} does not lie where {past} lies")
        sizes = dict(self._key.sizes)
        for spec in self._contract.inputs:
            for dim, size in zip(spec.shape, self._shapes[spec.name], strict=True):
                if isinstance(dim, str) and sizes.setdefault(dim, size) != size:
                    return self._refuse(f"{dim} has two sizes")
        if self._key.model == VISION:
            return self._see(sizes)
        batch = sizes["batch"]
        if not self._read("ancestors", ctypes.c_bool, batch, self._key.width, self._key.width).any(-1).all():
            return self._refuse("a token sees nothing, not even itself")
        if self._read("start", ctypes.c_int64, batch).max() + self._key.width > self._key.capacity:
            return self._refuse("a token lies behind the cache")
        binding = self._engine.session.io_binding()
        for bind, each in ((binding.bind_input, self._contract.inputs), (binding.bind_output, self._contract.outputs)):
            for spec in each:
                shape = [sizes.get(str(dim), dim) for dim in spec.shape]
                bind(spec.name, "cpu", 0, NUMPY[spec.dtype], shape, self._addresses[spec.name])
        self._engine.session.run_with_iobinding(binding)
        self._engine.library.runs.append((self._key.model, self._key.width, batch))
        if self._key.model == TARGET:
            self._engine.library.columns.append(sizes.get("columns", 0))
        return True

    def _see(self, sizes: dict[str, int]) -> bool:
        """Write as many entries as there are of such an image."""
        given = {
            spec.name: self._read(
                spec.name, CTYPES[spec.dtype], *[sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape]
            )
            for spec in self._contract.inputs
        }
        [spec] = self._contract.outputs
        [made] = self._engine.session.run(None, given)
        self._read(spec.name, CTYPES[spec.dtype], *made.shape)[:] = made
        self._engine.library.runs.append((VISION, 0, 1))
        return True

    def _read(self, name: str, kind: Any, *shape: int) -> Any:
        memory = (kind * math.prod(shape)).from_address(self._addresses[name])
        return np.ctypeslib.as_array(memory).reshape(shape)

    def _refuse(self, reason: str) -> bool:
        self._engine.logger.log(FakeTensorRT.ILogger.ERROR, reason)
        return False


class IExecutionContextRTX(IExecutionContext):
    def is_stream_capturable(self, stream: int) -> bool:
        """As it stands: nothing that has no shapes or addresses can be captured."""
        ready = len(self._shapes) == len(self._contract.inputs) and len(self._addresses) > len(self._shapes)
        return ready and stream == self._engine.library.stream
