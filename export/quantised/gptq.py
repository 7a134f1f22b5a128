"""GPTQ: whole numbers packed along the rows, with a scale and a zero point for a group of rows and column."""

import torch
from torch import Tensor

from ...engines import ExportError
from .method import Centred, Method, Parts, Settings, centre, in_groups, number, refuse_shape, unpack

BITS = (2, 4, 8)  # those that no word cuts in two


def matrix(parts: Parts, settings: Settings) -> Tensor:
    bits, scales = number(settings, "bits", BITS), parts[".scales"].float()  # [G, N]
    integers = unpack(parts[".qweight"].T, bits)  # [N, K]
    zeros = _zeros(parts, settings, bits)
    rows = integers.shape[1]
    refuse_shape(zeros, tuple(scales.shape), ".qzeros, unpacked,")
    refuse_shape(scales, (len(scales), integers.shape[0]), ".scales")
    group = number(settings, "group_size")
    groups = torch.arange(rows) // (rows if group == -1 else group)
    if ".g_idx" in parts:  # which group each row is in, where rows were quantised in another order
        groups = parts[".g_idx"].long()
        refuse_shape(groups, (rows,), ".g_idx")
    if groups.min() < 0 or groups.max() >= len(scales):
        raise ExportError(f".g_idx or group_size names group {int(groups.max())}, but there are {len(scales)}")
    return (integers - zeros.T[:, groups].float()) * scales.T[:, groups]  # [N, K]


def centred(parts: Parts, settings: Settings) -> Centred | None:
    bits, scales = number(settings, "bits", BITS), parts[".scales"].float()
    integers = unpack(parts[".qweight"].T, bits)
    rows = integers.shape[1]
    in_order = torch.arange(rows) // -(-rows // len(scales))
    if rows % len(scales) or not torch.equal(parts.get(".g_idx", in_order).long(), in_order):
        return None
    zeros = _zeros(parts, settings, bits)
    return Centred(centre(integers, bits), centre(zeros.T, bits), scales.T, bits)


def _zeros(parts: Parts, settings: Settings, bits: int) -> Tensor:
    zeros = unpack(parts[".qzeros"], bits)  # [G, N]
    if settings.get("checkpoint_format", "gptq") == "gptq":  # they are stored less one
        zeros = (zeros + 1) & ((1 << bits) - 1)
    return zeros


def words(settings: Settings) -> str:
    stored = settings.get("checkpoint_format", "gptq")
    if stored not in ("gptq", "gptq_v2"):
        raise ExportError(f"checkpoint_format is {stored!r}, expected gptq or gptq_v2")
    if settings.get("dynamic"):
        raise ExportError("dynamic gives single layers other settings, expected the same ones for all")
    bits, group = number(settings, "bits", BITS), number(settings, "group_size")
    return f"{bits} bits, {in_groups(group)}{', rows in another order' if settings.get('desc_act') else ''}"


GPTQ = Method(
    needs=(frozenset({".qweight", ".qzeros", ".scales"}),),
    may_have=frozenset({".g_idx"}),
    matrix=matrix,
    words=words,
    centred=centred,
)
