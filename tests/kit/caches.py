"""Caches equal those of a fresh prefill, and what they take and read is counted."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import onnx_ir as ir
import pytest
import torch
from torch import Tensor
from trt_spec.engines import BLOCK_TOKENS, ROW, Bundle
from trt_spec.export.passes.unround import before_rounding
from trt_spec.runtime import Decoder
from trt_spec.runtime.memory.cache import KVCache
from trt_spec.runtime.memory.full import CacheFull
from trt_spec.runtime.memory.model import Model
from trt_spec.runtime.memory.snapshots import EVERY
from trt_spec.tools.certificate.probe import Probe
from trt_spec.tools.certificate.rollback import Worst, compare_all
from trt_spec.tools.certificate.subject import Subject

from .bundles import Pair

# In float32: a step of width 1 and a prefill add the same products in another order, which costs up to 1e-5 in logits
# of size 10; a wrong cache entry costs more than 1e-2.
TOLERANCE = 1e-4


def probes(pair: Pair) -> dict[str, Probe]:
    subject = Subject(Bundle.open(pair.bundle), "onnxruntime", "cpu", batch=1)
    return {role: Probe(subject, role) for role in ("target", "draft")}


def require_all_fresh(decoder: Decoder, requests, fresh: dict[str, Probe]) -> None:
    assert all(occupant.request in requests for occupant in decoder.live)
    worst = {role: Worst() for role in fresh}
    compare_all(decoder, fresh, worst)
    assert all(max(one.logits, one.entries) <= TOLERANCE for one in worst.values()), worst


def bytes_of(bundle: Path, blocks: int) -> int:
    """So many blocks of all models, with copies of states among them."""
    contracts = [model.contract for model in Bundle.open(bundle).models.values()]
    copies = sum(-(-state.bytes // EVERY) for one in contracts for state in one.of_kind(ROW))
    return blocks * BLOCK_TOKENS * (copies + sum(one.cache_bytes_per_token for one in contracts))


def factors_of(bundle: Path, role: str = "target") -> dict[str, Tensor]:
    """What the graph as it is written divides each state of keys by."""
    factors = {}
    for scatter in ir.load(bundle / role / "model.onnx").graph:
        if scatter.op_type == "TensorScatter" and (parts := before_rounding(scatter).producer()).op_type == "Div":
            divided = parts.inputs[0].producer()
            if divided.op_type == "Div":
                name = scatter.outputs[0].name.removeprefix("present_")
                factors[name] = torch.tensor(divided.inputs[1].const_value.numpy())
    return factors


def read_by(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """How many tokens each model reads as prompts, by the model's id."""
    read, prefill = {}, Model.prefill

    def watched(self, rows, tokens):
        begun = sum(self.cache.entries[row] for row in rows)
        read[id(self)] = read.get(id(self), 0) + sum(map(len, tokens)) - begun
        return prefill(self, rows, tokens)

    monkeypatch.setattr(Model, "prefill", watched)
    return read


@contextmanager
def memory_for(entries: int) -> Iterator[list[int]]:
    """No buffers hold more entries than so many; the refused sizes."""
    allocate, refused = KVCache._allocate, []

    def limited(self, rows: int, tokens: int):
        if rows * tokens > entries:
            refused.append(rows * tokens)
            raise CacheFull("no memory for a cache: the test allows no more")
        return allocate(self, rows, tokens)

    with patch.object(KVCache, "_allocate", limited):
        yield refused
