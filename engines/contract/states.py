"""The states of a model: what it keeps of a request between two calls, each in memory that the caller owns."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TypeVar

from ..errors import ContractError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
FP8 = "float8_e4m3fn"
EIGHT_BITS = {"int8": 127.0, FP8: 448.0}  # dtypes of caches with scales, and the largest number of each
STATE_BYTES = DTYPE_BYTES | dict.fromkeys(EIGHT_BITS, 1)
TOKEN, WINDOW, ROW, SOURCE, CALL, IMAGE = "token", "window", "row", "source", "call", "image"
WRITTEN = re.compile(r"(\w+) (\w+)\[(\d+(?:, \d+)*)\] per (\w+)")  # a state as text

FEATURES = "features"  # the state of tokens that a target keeps for heads
IMAGES = "images"  # the state in which a call finds what its tokens of images mean

Dim = int | str
Size = TypeVar("Size", int, Dim)


@dataclass(frozen=True)
class StateKind:
    """The kinds of states: what there is a value of, how many values a row has, and how a graph writes them."""

    capacity: str  # the symbol for how many values a row has room for, its entries; empty: a row has one value
    output: bool  # a call gives the new values; without, it only reads them
    in_place: bool = False  # its output is the memory of its input; else the caller copies it there after the call
    kept: bool = True  # by the caller from one call to the next


STATE_KINDS: dict[str, StateKind] = {  # by what there is a value of
    # An entry is written when its token is read. To take a token back is to lower the row's length: the next call
    # overwrites the entry. Keys and values, features, latents, inputs of convolutions.
    TOKEN: StateKind("capacity", output=True, in_place=True),
    # Of the last tokens alone, in slots that a call says. What recurrent layers have read since their states.
    WINDOW: StateKind("slots", output=True, in_place=True),
    # It holds the first tokens of a row, none of which may be rejected, since it can never be taken back. It begins as
    # zeros. States of recurrent layers.
    ROW: StateKind("", output=True),
    # It is the same for the whole request. Keys and values of what an encoder has read.
    SOURCE: StateKind("source", output=False),
    # A call is given one for each of its tokens, that of the token before, and makes one for each that wants logits.
    # Hidden states of heads.
    CALL: StateKind("", output=True, kept=False),
    # A call is given as many as its rows need: entries of images, which a token names by the vocabulary's size plus
    # the place of one. What is put in the place of its embedding.
    IMAGE: StateKind("", output=False, kept=False),
}


@dataclass(frozen=True)
class State:
    """One state: its name, the kind, and shape and dtype of one value."""

    name: str
    shape: tuple[int, ...]  # heads and size, if a row has several values
    dtype: str
    kind: str = TOKEN

    def __post_init__(self) -> None:
        if self.kind not in STATE_KINDS:
            raise ContractError(f"contract lists {self}, a kind of state that this version does not know; update it")
        if self.dtype not in STATE_BYTES:
            raise ContractError(f"contract lists {self}, expected a dtype of {', '.join(STATE_BYTES)}; export it again")
        several = bool(STATE_KINDS[self.kind].capacity)
        positive = all(type(size) is int and size > 0 for size in self.shape)
        if not positive or not self.shape or (several and len(self.shape) != 2):
            expected = "heads and a size, both positive" if several else "positive sizes"
            raise ContractError(f"contract lists {self}, expected {expected}; export it again")

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}[{', '.join(map(str, self.shape))}] per {self.kind}"

    @classmethod
    def parse(cls, text: object) -> "State":
        """Read a state that was written as text."""
        found = WRITTEN.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise ContractError(
                f"contract lists {text!r}, expected a state such as {cls('key_0', (2, 64), 'float16')}; export it again"
            )
        name, dtype, shape, kind = found.groups()
        return cls(name, tuple(map(int, shape.split(", "))), dtype, kind)

    @property
    def bytes(self) -> int:
        """The bytes of one value."""
        return prod(self.shape) * STATE_BYTES[self.dtype]

    def memory(self, rows: Size, capacity: Size) -> tuple[Size | int, ...]:
        """Return the shape of its memory for so many rows, with room for so many entries each if it has entries."""
        if not STATE_KINDS[self.kind].capacity:
            return (rows, *self.shape)
        heads, size = self.shape
        return (rows, heads, capacity, size)


def source_states(layers: int, heads: int, size: int, dtype: str) -> tuple[State, ...]:
    """Return the keys and values that layers find of a source."""
    return tuple(
        replace(one, name=f"cross_{one.name}", kind=SOURCE) for one in keys_and_values(layers, heads, size, dtype)
    )


def keys_and_values(layers: int, heads: int, size: int, dtype: str, value_size: int | None = None) -> tuple[State, ...]:
    """Return the states of layers that are alike: key_0, value_0, key_1, …, values as large as keys or of a size."""
    sizes = {"key": size, "value": value_size or size}
    return tuple(
        State(f"{name}_{layer}", (heads, each), dtype) for layer in range(layers) for name, each in sizes.items()
    )


def scale_of(name: str) -> str:
    """Return the name of the state that has the scales of another: key_scale_0 for key_0."""
    role, _, layer = name.rpartition("_")
    return f"{role}_scale_{layer}"


def in_eight_bits(states: Iterable[State], dtype: str) -> Iterator[State]:
    """Give keys and values of tokens an eight-bit dtype, and after each the state of its scales.

    Each head of each token has a scale, in the dtype of the state if that takes two bytes.
    """
    for state in states:
        if state.kind != TOKEN or state.name.partition("_")[0] not in ("key", "value"):
            yield state
            continue
        heads, _ = state.shape
        yield replace(state, dtype=dtype)
        yield State(scale_of(state.name), (heads, 1), state.dtype if DTYPE_BYTES[state.dtype] == 2 else "bfloat16")
