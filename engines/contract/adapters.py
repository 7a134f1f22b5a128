"""Adapters of low rank (LoRA) that the rows of a call may have, each its own, beside the products of a graph."""

from dataclasses import dataclass
from typing import Any

from ..errors import ContractError
from .interface import TensorSpec

ADAPTER, OWNERS = "adapter", "owners"  # of each row its adapter, 0 for none; of each column whose it is,
FREE = -1  # if nobody's


@dataclass(frozen=True)
class Product:
    """A product with a matrix, by the name of the module that it is in the checkpoint."""

    name: str
    inputs: int
    outputs: int

    @property
    def down(self) -> str:
        """The graph's input for what narrows, `[columns, inputs]`: PEFT's lora_A of all adapters."""
        return f"lora_A.{self.name}"

    @property
    def up(self) -> str:
        """The graph's input for what widens again, `[columns, outputs]`: PEFT's lora_B of all adapters, turned."""
        return f"lora_B.{self.name}"


@dataclass(frozen=True)
class Adapters:
    """The room that a graph has for adapters. Beside each product, all of them lie in one memory as columns."""

    most: int  # adapters at a time
    rank: int  # the most columns that one of them takes
    products: tuple[Product, ...]

    def __post_init__(self) -> None:
        for name in ("most", "rank"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ContractError(f"contract field adapters has {name} {value!r}, expected a positive integer")

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Adapters":
        return cls(**fields | {"products": tuple(Product(**one) for one in fields["products"])})

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all matrices."""
        return tuple(name for one in self.products for name in (one.down, one.up))

    def inputs(self, dtype: str) -> tuple[TensorSpec, ...]:
        """Return the inputs that they add to a graph."""
        return (
            TensorSpec(ADAPTER, "int64", ("batch",)),
            TensorSpec(OWNERS, "int64", ("columns",)),
            *(
                spec
                for one in self.products
                for spec in (
                    TensorSpec(one.down, dtype, ("columns", one.inputs)),
                    TensorSpec(one.up, dtype, ("columns", one.outputs)),
                )
            ),
        )

    def bytes_each(self, itemsize: int) -> int:
        """Return the bytes of one adapter of the full rank."""
        return self.rank * itemsize * sum(one.inputs + one.outputs for one in self.products)
