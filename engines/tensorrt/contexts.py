"""Plans on the GPU: an opened plan holds its weights, and a context runs it at one size."""

import hashlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..bundle.whole_files import write_whole
from ..contract import Contract, VisionContract
from ..errors import EngineError
from .library import RuntimeLibrary
from .plans import CompiledPlan


class OpenedPlan:
    """One plan with its weights on the GPU."""

    def __init__(
        self, library: RuntimeLibrary, bundle: Path, plan: CompiledPlan, contract: Contract | VisionContract
    ) -> None:
        self.key, self.contract, self.bytes = plan.key, contract, plan.bytes
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

    def fits(self, sizes: Mapping[str, int]) -> bool:
        free = self.key.free.items()
        inside = all(least <= sizes.get(name, least) <= most for name, (least, most) in free)
        return inside and sizes["width"] <= self.key.width and sizes["rows"] <= self.key.rows

    def new_context(self) -> Any:
        context = self.engine.create_execution_context(self._settings)
        if context is None:
            raise EngineError(f"{self._file} cannot run: {self.reason()}; make room on the GPU")
        return context

    def close(self) -> None:
        """Free the plan, and save the kernels that the library has compiled since, if it has a cache for them."""
        if self._runtime_cache is not None:
            try:
                write_whole(self._cache_file, self._runtime_cache.serialize())
            except OSError as error:
                warnings.warn(f"the runtime cache {self._cache_file} cannot be saved: {error.strerror}", stacklevel=2)
        self.engine = self._runtime_cache = self._settings = None

    def reason(self) -> str:
        return self._library.complaints[-1] if self._library.complaints else "no reason given"


class Context:
    """A plan at one size; tensors stay bound until a step needs other memory."""

    def __init__(self, plan: OpenedPlan, free: Mapping[str, int], scratch: Tensor) -> None:
        self.key, self._plan, self._batch = plan.key, plan, free["batch"]
        self._context = plan.new_context()
        self._context.set_device_memory(scratch.data_ptr(), scratch.numel())
        self.sizes = {**free, **plan.key.sizes}
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
