"""Cosines and sines of the positions of a call's tokens, out of tables of all positions."""

from torch import Tensor

from .declare import declare


def _composition(
    start: Tensor,  # [B]
    depths: Tensor,  # [B, T + S], of which the last S are the call's own
    cosines: Tensor,  # [positions, D / 2]
    sines: Tensor,
    width: int,
) -> tuple[Tensor, Tensor]:
    position = (start[:, None] + depths[:, -width:]).clamp(0, len(cosines) - 1)
    return cosines[position], sines[position]


def _shape(start: Tensor, depths: Tensor, cosines: Tensor, sines: Tensor, width: int) -> tuple[Tensor, Tensor]:
    size = (len(start), width, cosines.shape[1])
    return cosines.new_empty(size), sines.new_empty(size)


_angles = declare(
    "angles",
    "(Tensor start, Tensor depths, Tensor cosines, Tensor sines, int width) -> (Tensor, Tensor)",
    _shape,
    _composition,
)


def angles(input_ids: Tensor, start: Tensor, depths: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = _angles(start, depths, cosines, sines, input_ids.shape[1])
    return found
