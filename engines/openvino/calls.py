"""One call of an OpenVINO model: the memory that it reads and writes, and the request that runs it."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..contract import ADAPTER, SPARE_BLOCK
from .sizes import Compiled


class Call:
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
        self.adapter = np.zeros(tokens, np.int64)  # of each token
        self._given: Mapping[str, Any] = {}
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
        self._target: Any = None  # the tensor to which the request writes the logits
        for name, array in arrays.items():
            self.request.set_tensor(name, ov.Tensor(array, shared_memory=True))
        self._filled = tokens

    def give(self, adapters: Mapping[str, Any]) -> None:
        """Let the request read the memory of adapters, if there are some and it does not yet."""
        if self._given is not adapters and adapters:
            import openvino as ov

            self._given = adapters
            for name, tensor in adapters.items():
                self.request.set_tensor(name, tensor)
            self.request.set_tensor(ADAPTER, ov.Tensor(self.adapter, shared_memory=True))

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


def bound(compiled: Compiled, cache: Mapping[str, Tensor]) -> Any:
    """Make a request that computes over this cache."""
    request = compiled.model.create_infer_request()
    for name, tensor in cache.items():
        request.set_tensor(name, shared(tensor))
    return request


def shared(tensor: Tensor) -> Any:
    """Hand the memory of a tensor to OpenVINO."""
    import openvino as ov

    if tensor.dtype == torch.bfloat16:  # which numpy lacks
        return ov.Tensor(tensor.view(torch.uint16).numpy(), list(tensor.shape), ov.Type.bf16)
    return ov.Tensor(tensor.numpy(), shared_memory=True)
