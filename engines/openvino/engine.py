"""OpenVINO on the CPU: the bundle's own graph, over a cache in blocks, with the tokens of all rows in one call.

Of a row with few tokens each is a sequence of its own, which sees the blocks of its row up to itself. So whatever is
computed for a token does not depend on the tokens beside it: on widths, on other rows, or on padding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..contract import MAX_DRAFT_LENGTH, PREFILL_WIDTH, SPARE_BLOCK, Contract
from ..cores import usable_cores
from ..engine import Step, chunks
from ..errors import EngineError
from .sizes import Compiled, FixedSizes

VERSION = "2026.4"  # of OpenVINO: PagedAttention promises no other version the same inputs
IN_BFLOAT16 = "openvino-bfloat16"
DTYPES = {"float32": "f32", "bfloat16": "bf16"}
NARROW = MAX_DRAFT_LENGTH + 1  # tokens of a row up to which each is a sequence of its own
GROUP = 64  # activations that are rounded to int8 together, where weights are integers
FREELY = 8  # tokens up to which a call of more tokens than needed costs next to nothing
MOST_PADDED = 2  # tokens added to a larger call, instead of changing its size
PATIENCE = 4  # smaller calls in a row after which the size follows
KEPT_CALLS = 64


def open_engines(
    name: str, models: Sequence[tuple[Path, Contract]], device: str, exact_weights: bool, alone: bool
) -> "list[OpenVinoEngine]":
    dtype = "bfloat16" if name == IN_BFLOAT16 else "float32"
    return [OpenVinoEngine(*model, device, dtype, exact_weights) for model in models]


class OpenVinoEngine:
    """See `Engine`. In the model for any number of tokens a call of another number than the last one's costs more.

    So a step is padded there to the size of recent ones where that costs less.
    """

    verify_width = NARROW
    static_capacity = reads_prefixes = takes_trees = False
    reads_together = True
    own_threads = True

    def __init__(self, graph: Path, contract: Contract, device: str, dtype: str, exact_weights: bool) -> None:
        if device != "cpu":
            raise EngineError(f"engine openvino runs on the device cpu, not on {device!r}; name that")
        if contract.dtype != "float32":
            raise EngineError(f"{graph} is {contract.dtype}, engine openvino expects float32; export with that --dtype")
        core = _library().Core()
        if dtype == "bfloat16" and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            raise EngineError("this processor cannot compute in bfloat16; use engine openvino")
        from .graph import paged_model

        self.contract, self.device = replace(contract.with_blocks(), dtype=dtype), device
        settings = {
            "INFERENCE_NUM_THREADS": usable_cores(),
            "INFERENCE_PRECISION_HINT": DTYPES[dtype],
            "KV_CACHE_PRECISION": DTYPES[dtype],
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0 if exact_weights else GROUP,
            "SNIPPETS_MODE": "DISABLE",  # kernels that a model for any number of tokens would not use
        }
        model = paged_model(graph, contract)
        try:
            self._any = Compiled(core.compile_model(model, "CPU", settings))
        except RuntimeError as error:
            raise EngineError(f"OpenVINO cannot compile {graph}: {_reason(error)}; use engine onnxruntime") from error
        self.fixed = FixedSizes(model, partial(core.compile_model, device_name="CPU", config=settings))
        self._cache: tuple[int, ...] = ()  # addresses of the cache that the calls are bound to
        self._reading: Any = None  # the request that reads prompts
        self._size, self._smaller = 0, 0  # tokens of the last narrow call, and how many calls in a row needed fewer

    def reserve(self, rows: int, capacity: int) -> None:
        """Accept all caches."""

    def prefill_widths(self, tokens: int) -> list[int]:
        return chunks(tokens, PREFILL_WIDTH)

    def step(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Step:
        sizes = self.contract.sizes({**inputs, **outputs})
        cache = {name: inputs[f"past_{name}"] for name in self.contract.cache_names}
        addresses = tuple(tensor.data_ptr() for tensor in cache.values())
        packing = _Packing(inputs, outputs["logits"])

        def run() -> None:
            if addresses != self._cache:  # the requests are bound to the old one
                self._any.calls.clear()
                self.fixed.forget_calls()
                self._reading, self._cache = None, addresses
            try:
                self._run(packing, cache)
            except RuntimeError as error:
                raise EngineError(
                    f"OpenVINO failed at batch {sizes['batch']}, width {sizes['width']}: {_reason(error)}"
                ) from error

        return Step(inputs, outputs, run)

    def _run(self, packing: "_Packing", cache: Mapping[str, Tensor]) -> None:
        count = packing.read()
        if not count:
            return
        if not packing.narrow:  # such calls hold much memory and are rarely of the same shape: none is kept
            self._reading = self._reading or _bound(self._any, cache)
            packing.run(_Call(self._reading, self.contract.vocab_size, *packing.shape(count)))
            return
        fixed = self.fixed.find(count)
        if fixed is None:
            packing.run(self._call(self._any, cache, packing.shape(self._size_for(count))))
            return
        shape = packing.shape(fixed.tokens)
        is_new = shape not in fixed.calls
        packing.run(self._call(fixed, cache, shape))
        if is_new:
            self._compare(packing, cache, shape)

    def _call(self, compiled: Compiled, cache: Mapping[str, Tensor], shape: tuple[int, int, int, int]) -> "_Call":
        call = compiled.calls.pop(shape, None) or _Call(_bound(compiled, cache), self.contract.vocab_size, *shape)
        compiled.calls[shape] = call
        if len(compiled.calls) > KEPT_CALLS:
            compiled.calls.pop(next(iter(compiled.calls)))  # the one not used for longest
        return call

    def _compare(self, packing: "_Packing", cache: Mapping[str, Tensor], shape: tuple[int, int, int, int]) -> None:
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

    def capturable(self) -> bool:
        return False

    def settle(self) -> None:
        self.fixed.settle()

    def close(self) -> None:
        self.fixed.close()
        self._any, self._reading = Compiled(None), None


class _Packing:
    """Packs the tokens that count of a step's rows into a call, and spreads the logits over the step's rows again."""

    def __init__(self, inputs: Mapping[str, Tensor], logits: Tensor) -> None:
        (self.batch, self.width), self.wanted_rows = inputs["input_ids"].shape, logits.shape[1]
        self.narrow = self.width <= NARROW
        self._ids, self._start = inputs["input_ids"].numpy().reshape(-1), inputs["start"].numpy()
        self._blocks, self._widths = inputs["blocks"].numpy().reshape(-1), inputs["widths"].numpy()
        self._logit_rows, self.logits = inputs["logit_rows"].numpy(), logits.numpy().reshape(-1, logits.shape[2])
        self._whole = _shared(logits.reshape(-1, 1, logits.shape[2]))
        self._steps = np.arange(self.width)
        self._places = np.zeros((self.batch, self.width), np.int64)  # of all tokens, in their rows
        row = np.arange(self.batch)[:, None]
        self._first_token = row * self.width  # of each row
        self._first_block = (row * (len(self._blocks) // self.batch)).astype(np.int32)
        self._first_block_of_token = np.broadcast_to(self._first_block, (self.batch, self.width)).reshape(-1)

    def read(self) -> int:
        """Find the tokens that count and return their number."""
        np.add(self._start[:, None], self._steps, out=self._places)
        self._position = self._places.reshape(-1)
        if not self.narrow:
            self._sequences = np.where(self._widths > NARROW, 1, self._widths)  # of each row
        self._index = None  # of the tokens that count; None: all, as nearly always
        starts, widths = self._start.tolist(), self._widths.tolist()
        self._longest = max((start + width for start, width in zip(starts, widths, strict=True) if width), default=0)
        if min(widths) < self.width:
            self._index = np.flatnonzero(self._steps < self._widths[:, None])
            self._position = self._position[self._index]
        return len(self._position)

    def shape(self, tokens: int) -> tuple[int, int, int, int]:
        """Return the numbers of tokens, wanted rows, sequences and blocks of a call with so many tokens."""
        wanted = tokens if self.wanted_rows == self.width else self.batch * self.wanted_rows
        # With an empty sequence at the end all tokens are computed one by one, also where they are fewer than threads.
        return tokens, wanted, 1 + (tokens if self.narrow else int(self._sequences.sum())), len(self._blocks)

    def run(self, call: "_Call") -> None:
        count = len(self._position)
        call.ids[:count, 0], call.positions[:count] = self._counting(self._ids), self._position
        call.blocks[:-1], call.longest[...] = self._blocks, self._longest
        if self.narrow:
            call.past[:count] = self._position
            call.block_begins[:count] = self._counting(self._first_block_of_token)
            call.pad(count)
        else:
            row = np.repeat(np.arange(self.batch), self._sequences)
            token = np.arange(len(row)) - np.repeat(np.cumsum(self._sequences) - self._sequences, self._sequences)
            np.cumsum(np.where(self._widths[row] > NARROW, self._widths[row], 1), out=call.begins[1:-1])
            call.past[:-1], call.block_begins[:-2] = self._start[row] + token, self._first_block[row, 0]
            call.begins[-1] = count
        wanted, places = self._wanted(count)
        call.wanted[: len(wanted)], call.wanted[len(wanted) :] = wanted, 0
        if len(call.wanted) == len(self.logits) and self._index is None:
            call.run(self._whole)
        else:
            call.run(call.own)
            self.logits[places] = call.logits[: len(wanted), 0]

    def _counting(self, each: "NDArray[Any]") -> "NDArray[Any]":
        """Return what belongs to the tokens that count."""
        return each if self._index is None else each[self._index]

    def _wanted(self, count: int) -> "tuple[NDArray[Any], Any]":
        """Return which tokens of the call give logits, and their rows among the step's logits."""
        wanted = (self._first_token + self._logit_rows).reshape(-1)
        if self._index is None:
            return wanted, slice(None)
        packed = np.full(self.batch * self.width, -1)  # the place of each token in the call
        packed[self._index] = np.arange(count)
        wanted = packed[wanted]
        places = np.flatnonzero(wanted >= 0)
        return wanted[places], places


class _Call:
    """Calls of one shape in a request, with memory for all that it reads and for the logits that it writes."""

    def __init__(self, request: Any, vocab_size: int, tokens: int, wanted: int, sequences: int, table: int) -> None:
        import openvino as ov

        self.logits = np.zeros((wanted, 1, vocab_size), np.float32)
        self.ids, self.positions = np.zeros((tokens, 1), np.int64), np.zeros(tokens, np.int64)
        self.wanted = np.arange(wanted)
        self.past, self.begins = np.zeros(sequences, np.int32), np.arange(sequences + 1, dtype=np.int32)
        self.begins[-1] -= 1  # the last sequence is empty
        self.blocks, self.block_begins = np.full(table + 1, SPARE_BLOCK, np.int32), np.zeros(sequences + 1, np.int32)
        self.longest = np.zeros((), np.int32)
        self.request = request
        arrays = {
            "input_ids": self.ids,
            "start": self.positions,
            "rows": self.wanted,
            "past_lens": self.past,
            "subsequence_begins": self.begins,
            "block_indices": self.blocks,
            "block_indices_begins": self.block_begins,
            "max_context_len": self.longest,
        }
        self.own = ov.Tensor(self.logits, shared_memory=True)
        self._target: Any = None  # where the request writes the logits
        for name, array in arrays.items():
            self.request.set_tensor(name, ov.Tensor(array, shared_memory=True))
        self._filled = tokens

    def run(self, target: Any) -> None:
        """Run, and write the logits to this tensor."""
        if self._target is not target:
            self._target = target
            self.request.set_tensor("logits", target)
        self.request.infer(share_inputs=True, share_outputs=True)

    def pad(self, count: int) -> None:
        """Let all tokens but the first `count` be sequences of the spare block."""
        if count < self._filled:
            self.ids[count:], self.positions[count:] = 0, 0
            self.past[count:], self.block_begins[count:] = 0, len(self.blocks) - 1
        self._filled = count


def _bound(compiled: Compiled, cache: Mapping[str, Tensor]) -> Any:
    """Make a request that computes over this cache."""
    request = compiled.model.create_infer_request()
    for name, tensor in cache.items():
        request.set_tensor(name, _shared(tensor))
    return request


def _shared(tensor: Tensor) -> Any:
    """Hand the memory of a tensor to OpenVINO."""
    import openvino as ov

    if tensor.dtype == torch.bfloat16:  # which numpy lacks
        return ov.Tensor(tensor.view(torch.uint16).numpy(), list(tensor.shape), ov.Type.bf16)
    return ov.Tensor(tensor.numpy(), shared_memory=True)


def _reason(error: Exception) -> str:
    """Return the line that says what is wrong, below those that say where."""
    lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith("Exception from")]
    return lines[-1].strip() if lines else type(error).__name__


def _library() -> Any:
    try:
        import openvino
    except ImportError as error:
        raise EngineError("engine openvino needs the openvino package; pip install 'trt-spec[openvino]'") from error
    if not openvino.__version__.startswith(VERSION):
        raise EngineError(
            f"engine openvino needs OpenVINO {VERSION}, found {openvino.__version__}; pip install 'trt-spec[openvino]'"
        )
    return openvino
