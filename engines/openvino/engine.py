"""OpenVINO on the CPU: the bundle's own graph, over a cache in blocks, with the tokens of all rows in one call."""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..bundle import ADAPTED
from ..contract import ADAPTER, OWNERS, Contract
from ..cores import usable_cores
from ..engine import Engine, Step
from ..errors import EngineError
from .calls import Call, bound, shared
from .library import core, library
from .packing import NARROW, Packing
from .sizes import Compiled, FixedSizes

IN_BFLOAT16 = "openvino-bfloat16"
DTYPES = {"float32": "f32", "bfloat16": "bf16"}
GROUP = 64  # activations that are rounded to int8 together, if the weights are integers
FREELY = 8  # tokens up to which a call of more tokens than needed costs next to nothing
MOST_PADDED = 2  # tokens added to a larger call, instead of changing its size
PATIENCE = 4  # smaller calls in a row after which the size follows
KEPT_CALLS = 64


def open_engines(
    name: str, models: Sequence[tuple[Path, Contract]], device: str, exact_weights: bool, alone: bool
) -> "list[OpenVinoEngine]":
    dtype = "bfloat16" if name == IN_BFLOAT16 else "float32"
    return [OpenVinoEngine(*model, device, dtype, exact_weights) for model in models]


class OpenVinoEngine(Engine):
    """A graph in a model for any number of tokens, and in models for the numbers that calls often have.

    The first one is slower whenever the number changes. So a step that runs in it is padded to the size of recent ones
    if that costs less. Rows with adapters run in another engine, over the graph that has room for them.
    """

    verify_width = NARROW
    takes_trees = takes_tails = False
    reads_together = own_threads = True

    def __init__(
        self, graph: Path, contract: Contract, device: str, dtype: str, exact_weights: bool, adapted: bool = False
    ) -> None:
        if device != "cpu":
            raise EngineError(f"engine openvino runs on the device cpu, not on {device!r}; name that")
        if contract.dtype != "float32":
            raise EngineError(f"{graph} is {contract.dtype}, engine openvino expects float32; export with that --dtype")
        if narrow := contract.rounded_to:
            raise EngineError(
                f"{graph} keeps keys and values in {narrow}, engine openvino expects float32; use engine onnxruntime"
            )
        compiler = core(library())
        if dtype == "bfloat16" and "BF16" not in compiler.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            raise EngineError("this processor cannot compute in bfloat16; use engine openvino")
        from .graph import paged_model

        self.contract, self.device = contract.with_blocks().in_dtype(dtype), device
        called = contract if adapted else contract.without_adapters
        self._called = self.contract if adapted else self.contract.without_adapters
        beside = graph.with_name(ADAPTED + graph.name)
        self._with_adapters = cache(partial(OpenVinoEngine, beside, contract, device, dtype, exact_weights, True))
        settings = {
            "INFERENCE_NUM_THREADS": usable_cores(),
            "INFERENCE_PRECISION_HINT": DTYPES[dtype],
            "KV_CACHE_PRECISION": DTYPES[dtype],
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0 if exact_weights else GROUP,
            "SNIPPETS_MODE": "DISABLE",  # kernels that a model for any number of tokens would not use
        }
        model = paged_model(graph, called)
        try:
            self._any = Compiled(compiler.compile_model(model, "CPU", settings))
        except RuntimeError as error:
            raise EngineError(f"OpenVINO cannot compile {graph}: {_reason(error)}; use engine onnxruntime") from error
        self.fixed = FixedSizes(model, partial(compiler.compile_model, device_name="CPU", config=settings))
        if adapted:
            self.fixed.give_up()
        self._cache: tuple[int, ...] = ()  # addresses of the cache that the calls are bound to
        self._reading: Any = None  # the request that reads prompts
        self._size, self._smaller = 0, 0  # tokens of the last narrow call, and how many calls in a row needed fewer

    def step(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Step:
        if ADAPTER in inputs and self._called is not self.contract:
            return self._with_adapters().step(inputs, outputs)
        sizes = self._called.sizes({**inputs, **outputs})
        states = {name: inputs[f"past_{name}"] for name in self.contract.cache_names}
        addresses = tuple(tensor.data_ptr() for tensor in states.values())
        packing = Packing(inputs, outputs["logits"])
        room = self._called.adapters
        given = {} if room is None else {name: shared(inputs[name]) for name in (OWNERS, *room.names)}

        def run() -> None:
            if addresses != self._cache:  # the requests are bound to the old one
                self._any.calls.clear()
                self.fixed.forget_calls()
                self._reading, self._cache = None, addresses
            try:
                self._run(packing, states, given)
            except RuntimeError as error:
                raise EngineError(
                    f"OpenVINO failed at batch {sizes['batch']}, width {sizes['width']}: {_reason(error)}"
                ) from error

        return Step(inputs, outputs, run)

    def _run(self, packing: Packing, cache: Mapping[str, Tensor], given: Mapping[str, Any]) -> None:
        count = packing.read()
        if not count:
            return
        if not packing.narrow:  # such calls hold much memory and are rarely of the same shape: none is kept
            self._reading = self._reading or bound(self._any, cache)
            call = Call(self._reading, self.contract.vocab_size, *packing.shape(count))
            call.give(given)
            packing.run(call)
            return
        fixed = self.fixed.find(count)
        if fixed is None:
            call = self._call(self._any, cache, packing.shape(self._size_for(count)))
            call.give(given)
            packing.run(call)
            return
        shape = packing.shape(fixed.tokens)
        is_new = shape not in fixed.calls
        packing.run(self._call(fixed, cache, shape))
        if is_new:
            self._compare(packing, cache, shape)

    def _call(self, compiled: Compiled, cache: Mapping[str, Tensor], shape: tuple[int, int, int, int]) -> Call:
        call = compiled.calls.pop(shape, None) or Call(bound(compiled, cache), self.contract.vocab_size, *shape)
        compiled.calls[shape] = call
        if len(compiled.calls) > KEPT_CALLS:
            compiled.calls.pop(next(iter(compiled.calls)))  # the one not used for longest
        return call

    def _compare(self, packing: Packing, cache: Mapping[str, Tensor], shape: tuple[int, int, int, int]) -> None:
        """Run the step again in the model for any number; if the bits differ, use that model alone from now on."""
        found = packing.logits.copy()
        packing.run(self._call(self._any, cache, shape))
        if not np.array_equal(found, packing.logits, equal_nan=True):
            self.fixed.give_up()

    def _size_for(self, tokens: int) -> int:
        """Choose how many tokens a narrow call has: as many as the last one where a change would cost more."""
        fits = tokens <= self._size <= max(FREELY, tokens + MOST_PADDED)
        self._smaller = self._smaller + 1 if tokens < self._size else 0
        if not fits or self._smaller > PATIENCE:
            self._size, self._smaller = tokens, 0
        return self._size

    def open_adapters(self) -> None:
        self._with_adapters()

    def settle(self) -> None:
        self.fixed.settle()

    def close(self) -> None:
        if self._with_adapters.cache_info().currsize:
            self._with_adapters().close()
        self._with_adapters.cache_clear()
        self.fixed.close()
        self._any, self._reading = Compiled(None), None


def _reason(error: Exception) -> str:
    """Return the line that says what is wrong, below those that say where."""
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith("Exception from")]
    return lines[-1].strip() if lines else type(error).__name__
