"""The interface of a graph: its inputs and outputs by name, with a dtype and a shape that may have symbols."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from ..errors import ContractError
from .states import Dim

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype and shape of one graph input or output; a dimension is a number or a symbol."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}[{', '.join(map(str, self.shape))}]"


class Interface(ABC):
    """The part of any graph's contract that an engine asks for."""

    dtype: str  # of weights
    adapters: Any = None  # the room of a second graph beside it, if there is one
    shards = 1  # that run a call together, each on a device of its own

    @property
    def without_adapters(self) -> Self:
        """The interface of a call in which no row has an adapter."""
        return self

    @property
    @abstractmethod
    def inputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    @abstractmethod
    def outputs(self) -> tuple[TensorSpec, ...]: ...

    @property
    def rounded_to(self) -> str:
        """The eight-bit dtype of keys and values, which have scales then; empty if nothing rounds them."""
        return ""

    def sizes(self, tensors: "Mapping[str, Tensor]") -> dict[str, int]:
        """Return the size of each symbol in the shapes of these tensors, which must be all that the contract lists."""
        sizes: dict[str, int] = {}
        for spec in (*self.inputs, *self.outputs):
            found = tensors[spec.name].shape
            expected = [
                sizes.setdefault(dim, size) if isinstance(dim, str) else dim
                for dim, size in zip(spec.shape, found, strict=True)
            ]
            assert list(found) == expected, f"{spec} got a tensor {list(found)}, expected {expected}"
        return sizes

    def check(self, graph: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
        """Refuse a graph whose tensors are not exactly those of this contract."""
        for kind, expected, found in (("input", self.inputs, inputs), ("output", self.outputs, outputs)):
            by_name = {spec.name: spec for spec in found}
            for spec in expected:
                if spec.name not in by_name:
                    raise ContractError(
                        f"{graph} has no {kind} {spec.name!r}, its contract promises {spec}; export it again"
                    )
                if by_name[spec.name] != spec:
                    raise ContractError(
                        f"{graph} has the {kind} {by_name[spec.name]}, its contract promises {spec}; export it again"
                    )
            extra = sorted(set(by_name) - {spec.name for spec in expected})
            if extra:
                raise ContractError(
                    f"{graph} has the {kind} {extra[0]!r}, which its contract does not know; export it again"
                )


def in_words(sizes: Mapping[str, int]) -> str:
    """Name a call by what a user knows of its sizes."""
    return ", ".join(f"{name} {sizes[name]}" for name in ("batch", "width", "source") if name in sizes)
