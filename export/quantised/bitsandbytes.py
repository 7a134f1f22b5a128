"""bitsandbytes: numbers of four bits from a table (NF4, FP4), or int8 with a scale for each row."""

import json

import torch
from torch import Tensor

from ...engines import ExportError
from .method import Method, Parts, Settings, refuse_shape

STATES = tuple(f".weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
NESTED = frozenset({".weight.nested_absmax", ".weight.nested_quant_map"})


def matrix(parts: Parts, settings: Settings) -> Tensor:
    if ".SCB" in parts:
        if ".weight_format" in parts and int(parts[".weight_format"]) != 0:
            raise ExportError(".weight_format is not 0, whose numbers lie in another order; expected rows")
        refuse_shape(parts[".SCB"], (len(parts[".weight"]),), ".SCB")
        return parts[".weight"].float() * (parts[".SCB"].float() / 127)[:, None]
    state = json.loads(bytes(next(parts[ending] for ending in STATES if ending in parts).tolist()))
    packed = parts[".weight"].flatten()
    numbers = torch.stack((packed >> 4, packed & 15), -1).flatten().int()  # the high half is first
    shape, size = state["shape"], state["blocksize"]
    values = parts[".weight.quant_map"].float()[numbers]
    refuse_shape(values, (shape[0] * shape[1],), ".weight, unpacked,")
    largest = _largest(parts, state)
    refuse_shape(largest, (-(-len(values) // size),), ".weight.absmax")
    return values.mul_(largest.repeat_interleave(size)[: len(values)]).view(shape)


def _largest(parts: Parts, state: dict[str, int]) -> Tensor:
    """Return the largest number of each block; they may be quantised in blocks themselves, about an offset."""
    stored = parts[".weight.absmax"]
    if ".weight.nested_absmax" not in parts:
        return stored.float()
    scales = parts[".weight.nested_absmax"].float().repeat_interleave(state["nested_blocksize"])[: len(stored)]
    return parts[".weight.nested_quant_map"].float()[stored.int()] * scales + state["nested_offset"]


def words(settings: Settings) -> str:
    if settings.get("load_in_8bit"):
        return "8 bits, one scale a row"
    kind = settings.get("bnb_4bit_quant_type", "fp4")
    return f"4 bits ({kind.upper()}){', scales in 8 bits' if settings.get('bnb_4bit_use_double_quant') else ''}"


BITSANDBYTES = Method(
    needs=(
        *(frozenset({".weight", ".weight.absmax", ".weight.quant_map", state}) for state in STATES),
        frozenset({".weight", ".SCB"}),
    ),
    may_have=NESTED | {".weight_format"},
    matrix=matrix,
    words=words,
)
