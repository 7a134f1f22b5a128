"""Compute gpt-oss's gate in float32: its factor 1.702 would be another number as a half-precision constant."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts


@contextmanager
def ready(_: Any) -> Iterator[None]:
    gate = GptOssExperts._apply_gate
    GptOssExperts._apply_gate = lambda self, gate_up: gate(self, gate_up.float()).to(gate_up.dtype)
    try:
        yield
    finally:
        GptOssExperts._apply_gate = gate
