"""Adapters of low rank (LoRA) that the rows of a call may have, each its own, beside the products of a graph."""

from dataclasses import asdict, dataclass
from typing import Any

from ..errors import ContractError
from .interface import TensorSpec
from .parts import Part

ADAPTER, OWNERS = "adapter", "owners"  # of each row its adapter, 0 for none; of each column whose it is,
FREE = -1  # if nobody's


@dataclass(frozen=True)
class Product:
    """A product with a matrix, by the name of the module that it is in the checkpoint."""

    name: str
    inputs: int
    outputs: int
    input_parts: tuple[Part, ...] = ()  # of which each shard has its share; without, it has all
    output_parts: tuple[Part, ...] = ()

    @property
    def down(self) -> str:
        """The graph's input for what narrows, `[columns, inputs]`: PEFT's lora_A of all adapters."""
        return f"lora_A.{self.name}"

    @property
    def up(self) -> str:
        """The graph's input for what widens again, `[columns, outputs]`: PEFT's lora_B of all adapters, turned."""
        return f"lora_B.{self.name}"

    @property
    def matrices(self) -> tuple[tuple[str, int, tuple[Part, ...]], ...]:
        """The names of both, how wide they are, and the parts that are shared out."""
        return (self.down, self.inputs, self.input_parts), (self.up, self.outputs, self.output_parts)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Product":
        parts = {name: tuple(Part(**one) for one in fields.get(name, ())) for name in ("input_parts", "output_parts")}
        return cls(**fields | parts)


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
        return cls(**fields | {"products": tuple(map(Product.from_json, fields["products"]))})

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON has them; parts are there in shards alone."""
        products = [{name: value for name, value in asdict(one).items() if value != ()} for one in self.products]
        return asdict(self) | {"products": products}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all matrices."""
        return tuple(name for one in self.products for name, *_ in one.matrices)

    def widths(self, shards: int = 1) -> dict[str, int]:
        """Return how wide each matrix is, or what each shard has of it."""
        return {
            name: sum(part.share(shards) for part in parts) or width
            for one in self.products
            for name, width, parts in one.matrices
        }

    def inputs(self, dtype: str, shards: int = 1) -> tuple[TensorSpec, ...]:
        """Return the inputs that they add to a graph, or to each of its shards."""
        return (
            TensorSpec(ADAPTER, "int64", ("batch",)),
            TensorSpec(OWNERS, "int64", ("columns",)),
            *(TensorSpec(name, dtype, ("columns", width)) for name, width in self.widths(shards).items()),
        )

    def bytes_each(self, itemsize: int) -> int:
        """Return the bytes of one adapter of the full rank."""
        return self.rank * itemsize * sum(one.inputs + one.outputs for one in self.products)
