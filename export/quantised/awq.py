"""AWQ: numbers of four bits, packed along the columns with the even ones first, and a zero point for each group."""

from torch import Tensor

from ...engines import ExportError
from .method import Centred, Method, Parts, Settings, centre, in_groups, number, refuse_shape, unpack

BITS = 4
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # where each of eight neighbouring columns lies in its word


def matrix(parts: Parts, settings: Settings) -> Tensor:
    integers, zeros = in_order(parts[".qweight"]), in_order(parts[".qzeros"])  # [K, N] and [G, N]
    scales = parts[".scales"].float()
    group = _group_size(settings)
    group = len(integers) if group == -1 else group
    refuse_shape(scales, (-(-len(integers) // group), integers.shape[1]), ".scales")
    refuse_shape(zeros, tuple(scales.shape), ".qzeros, unpacked,")
    each = [numbers.repeat_interleave(group, 0)[: len(integers)] for numbers in (zeros.float(), scales)]
    return ((integers - each[0]) * each[1]).T.contiguous()  # [N, K]


def centred(parts: Parts, settings: Settings) -> Centred | None:
    integers, zeros, scales = in_order(parts[".qweight"]), in_order(parts[".qzeros"]), parts[".scales"].float()
    if len(integers) % len(scales):
        return None
    return Centred(centre(integers.T, BITS), centre(zeros.T, BITS), scales.T, BITS)


def in_order(words: Tensor) -> Tensor:
    return unpack(words, BITS).view(*words.shape, 8)[..., PLACES].flatten(-2)


def _group_size(settings: Settings) -> int:
    return number(settings, "group_size" if "group_size" in settings else "q_group_size")


def words(settings: Settings) -> str:
    layout = str(settings.get("version", "gemm")).lower()
    if layout != "gemm":
        raise ExportError(f"version is {layout!r}, whose numbers lie in another order; expected gemm")
    bits = number(settings, "bits" if "bits" in settings else "w_bit", (BITS,))
    if settings.get("zero_point", True) is not True:
        raise ExportError("zero_point is false, expected zero points")
    return f"{bits} bits, {in_groups(_group_size(settings))}"


AWQ = Method(
    needs=(frozenset({".qweight", ".qzeros", ".scales"}),),
    may_have=frozenset(),
    matrix=matrix,
    words=words,
    centred=centred,
)
