"""Let an object have other attributes while it is traced, numbers that no dtype rounds among them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


class Factor:
    """A factor, or divisor, of hidden states: a constant of their dtype would be another in half precision."""

    def __init__(self, number: float) -> None:
        self.number = number

    def __pow__(self, power: float) -> "Factor":
        return Factor(self.number**power)

    def __rmul__(self, hidden: Tensor) -> Tensor:
        return (hidden.float() * self.number).to(hidden.dtype)

    def __rtruediv__(self, hidden: Tensor) -> Tensor:
        return (hidden.float() / self.number).to(hidden.dtype)


@contextmanager
def swapped(owner: Any, **others: Any) -> Iterator[None]:
    """Give a class, a module or an object these attributes until the block ends, in place of its own if it has them."""
    before = {name: vars(owner)[name] for name in others if name in vars(owner)}
    for name, other in others.items():
        setattr(owner, name, other)
    try:
        yield
    finally:
        for name in others:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)
