"""The contract of a graph that sees: it reads one image, and gives an entry for each of its tokens in a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ..errors import ContractError
from .interface import Interface, TensorSpec
from .states import DTYPE_BYTES, IMAGES


@dataclass(frozen=True)
class VisionContract(Interface):
    """The inputs that an image is given by, the numbers of each entry that is made of it, and its token in a prompt."""

    given: tuple[TensorSpec, ...]
    size: int
    dtype: str
    token: int  # that stands for an entry in a prompt

    states = ()  # it keeps nothing
    aliases = MappingProxyType[str, str]({})

    def __post_init__(self) -> None:
        for name in ("size", "token"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise ContractError(f"contract field {name} is {value!r}, expected a positive integer")
        if self.dtype not in DTYPE_BYTES:
            raise ContractError(f"contract dtype is {self.dtype!r}, expected {', '.join(DTYPE_BYTES)}")

    @classmethod
    def from_json(cls, fields: Any) -> "VisionContract":
        if not isinstance(fields, dict) or set(fields) != {"inputs", "size", "dtype", "token"}:
            found = sorted(fields) if isinstance(fields, dict) else fields
            raise ContractError(
                f"contract of a vision graph has the fields {found}, expected dtype, inputs, size, token"
            )
        return cls(tuple(map(_spec, fields["inputs"])), fields["size"], fields["dtype"], fields["token"])

    def to_json(self) -> dict[str, Any]:
        inputs = [[one.name, one.dtype, list(one.shape)] for one in self.given]
        return {"inputs": inputs, "size": self.size, "dtype": self.dtype, "token": self.token}

    def in_dtype(self, dtype: str) -> "VisionContract":
        """Return the contract of this graph in another dtype; an image is given in float32 whatever that is."""
        return replace(self, dtype=dtype)

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self.given

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec(IMAGES, self.dtype, ("entries", self.size)),)


def _spec(written: Sequence[Any]) -> TensorSpec:
    try:
        name, dtype, shape = written
        return TensorSpec(str(name), str(dtype), tuple(dim if isinstance(dim, int) else str(dim) for dim in shape))
    except (TypeError, ValueError) as error:
        raise ContractError(
            f"contract of a vision graph lists {written!r}, expected a name, a dtype and a shape; export it again"
        ) from error
