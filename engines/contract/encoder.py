"""The contract of an encoder, which reads a source once: what it gives are the states of a source of its decoders."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Self

from ..errors import ContractError
from .adapters import Adapters
from .contract import Contract
from .interface import Interface, TensorSpec
from .states import SOURCE, State
from .vision import VisionContract


@dataclass(frozen=True)
class Sound:
    """How sound is given to an encoder: as a picture of so many bands and frames, whatever its length."""

    bands: int
    frames: int


@dataclass(frozen=True)
class EncoderContract(Interface):
    """The numbers that fix an encoder's interface; `inputs` and `outputs` spell them out."""

    feeds: Mapping[str, tuple[State, ...]]  # the states of each model that reads what it gives, by the model's name
    vocab_size: int
    longest: int  # entries that it gives at most of a source
    dtype: str
    sound: Sound | None = None  # if its sources are no tokens
    adapters: Adapters | None = None  # the room of a second graph beside it, if there is one

    states = ()  # it keeps nothing
    aliases = MappingProxyType[str, str]({})

    def __post_init__(self) -> None:
        for name in ("vocab_size", "longest"):
            if type(value := getattr(self, name)) is not int or value < 1:
                raise ContractError(f"contract field {name} is {value!r}, expected a positive integer")
        kinds = {state.kind for states in self.feeds.values() for state in states}
        if kinds != {SOURCE}:
            raise ContractError(f"contract of an encoder lists states of the kinds {sorted(kinds)}, expected {SOURCE}")

    @classmethod
    def from_json(cls, fields: Any) -> "EncoderContract":
        names = set(cls.__dataclass_fields__) - {"adapters"}
        if not isinstance(fields, dict) or set(fields) - {"adapters"} != names:
            found = sorted(fields) if isinstance(fields, dict) else fields
            raise ContractError(f"contract of an encoder has the fields {found}, expected {sorted(names)}")
        feeds = {model: tuple(map(State.parse, states)) for model, states in fields["feeds"].items()}
        own: dict[str, Any] = {"feeds": feeds, "sound": Sound(**fields["sound"]) if fields["sound"] else None}
        if "adapters" in fields:
            own["adapters"] = Adapters.from_json(fields["adapters"])
        return cls(**fields | own)

    def to_json(self) -> dict[str, Any]:
        feeds = {model: list(map(str, states)) for model, states in self.feeds.items()}
        own = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "adapters"}
        own |= {"feeds": feeds, "sound": asdict(self.sound) if self.sound else None}
        return own if self.adapters is None else own | {"adapters": self.adapters.to_json()}

    def in_dtype(self, dtype: str) -> "EncoderContract":
        """Return the contract of this graph in another dtype."""
        feeds = {model: tuple(replace(state, dtype=dtype) for state in states) for model, states in self.feeds.items()}
        return replace(self, feeds=feeds, dtype=dtype)

    @cached_property
    def without_adapters(self) -> Self:
        return self if self.adapters is None else replace(self, adapters=None)

    @cached_property
    def inputs(self) -> tuple[TensorSpec, ...]:
        more = () if self.adapters is None else self.adapters.inputs(self.dtype)
        if self.sound is not None:
            return TensorSpec("sound", "float32", ("batch", self.sound.bands, self.sound.frames)), *more
        ids, length = (
            TensorSpec("source_ids", "int64", ("batch", "source")),
            TensorSpec("source_length", "int64", ("batch",)),
        )
        return ids, length, *more

    @cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        entries = "source" if self.sound is None else self.longest
        return tuple(
            TensorSpec(output_name(model, state), state.dtype, state.memory("batch", entries))
            for model, states in self.feeds.items()
            for state in states
        )


AnyContract = Contract | EncoderContract | VisionContract


def output_name(model: str, state: State) -> str:
    """Name what an encoder gives for a state of a model."""
    return f"{model}_{state.name}"
