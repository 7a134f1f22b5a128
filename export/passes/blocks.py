"""A matrix in blocks of small numbers."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """A matrix `[K, N]` as small numbers; each block of rows and column has one scale, and perhaps a zero point."""

    numbers: Tensor  # [K, N] int8 or float8_e4m3fn
    scales: Tensor  # [K / block, N] float32
    block: int
    zeros: Tensor | None = None  # [K / block, N] int8
    shifts: Tensor | None = None  # [K / block, N] float32, added to what numbers and scales make
    made_of: tuple[Tensor, Tensor] | None = None  # [K / block, N] float8_e4m3fn, and the float that makes scales of it

    def matrix(self) -> Tensor:
        numbers = self.numbers.view(len(self.scales), self.block, -1)
        numbers = numbers if self.zeros is None else numbers - self.zeros[:, None]
        numbers = numbers.float() if numbers.is_floating_point() else numbers
        wide = numbers * self.scales[:, None]
        return (wide if self.shifts is None else wide + self.shifts[:, None]).view_as(self.numbers)
