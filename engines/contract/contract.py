"""The contract of a graph: every input and output, its shape and dtype, and which output is which input's memory."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from ..errors import ContractError
from .adapters import Adapters
from .interface import Interface, TensorSpec
from .states import CALL, DTYPE_BYTES, EIGHT_BITS, IMAGE, IMAGES, ROW, SOURCE, STATE_KINDS, TOKEN, WINDOW, Dim, State

if TYPE_CHECKING:
    from torch import Tensor

WIDEST_STEP = 65  # a graph runs at any width; a round verifies at most the last token and 64 proposals
MAX_DRAFT_LENGTH = 16  # proposals in a line
FOREIGN_WINDOW = 8  # tokens that a draft with tokens of its own reads first in a round
PREFILL_WIDTH = 256  # prompt tokens that one call reads
SLACK = max(2 * WIDEST_STEP, PREFILL_WIDTH)  # tokens that a call may write past the longest sequence
GRANULE = 64  # buffer lengths are multiples of this
ALIGNMENT = 256  # bytes; TensorRT demands this of the addresses it is given
BLOCK_TOKENS = 32  # entries in each block of a cache that is read by a table of blocks
SLOTS = 16  # for what recurrent layers have read of a row: a call may fill half with what may fall; they can grow
MOST_SLOTS = 2 * (WIDEST_STEP + 1)  # of a row; those of an engine that takes one size alone
MOST_PENDING = MAX_DRAFT_LENGTH + 1  # tokens that one round leaves for the next to absorb
SPARE_BLOCK = 0  # belongs to no row: unused places of a table name it, and its entries are never read
BLOCKS = "blocks"  # the capability of a step whose cache is such blocks
RECURRENT = "recurrent"  # that of a graph with layers whose states absorb tokens when a call says so
SOURCES = "sources"  # that of a graph whose rows may have read sources of unlike lengths
AXES = "axes"  # that of a graph whose tokens have positions on three axes, as images have
WHOLE_IMAGES = "whole_images"  # that of a graph in which tokens of an image see each other, so that one call reads all
OPTIONAL = frozenset(("adapters", "shards"))  # fields that a contract need not have
TAILS = "tails"  # that of a graph whose calls say of some entries before theirs, too, which token sees them


@dataclass(frozen=True)
class Capability:
    """An ability of some graphs only, with the inputs and outputs that it adds to their contract."""

    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    # Called with all inputs before each run. It fills its own, if the caller of a step brings no tensors for them.
    fill: "Callable[[Mapping[str, Tensor]], None] | None" = None


def _whole_width(inputs: "Mapping[str, Tensor]") -> None:
    inputs["widths"].fill_(inputs["input_ids"].shape[1])


CAPABILITIES: dict[str, Capability] = {  # by the name under which contracts list them
    BLOCKS: Capability(
        inputs=(
            TensorSpec("blocks", "int32", ("batch", "blocks_per_row")),  # the block of each 32 entries of a row
            TensorSpec("widths", "int64", ("batch",)),  # how many of a row's tokens count; the others are not computed
        ),
        fill=_whole_width,
    ),
    # The tokens that a row's states have not absorbed lie in slots; a call's own tokens follow them.
    RECURRENT: Capability(
        inputs=(
            TensorSpec("pending", "int64", ("batch", "pending")),  # those slots, in the order of their tokens
            TensorSpec("count", "int64", ("batch",)),  # how many of them count
            TensorSpec("fold", "int64", ("batch",)),  # the new states have absorbed so many of all these tokens
            TensorSpec("slot", "int64", ("batch",)),  # where the call's own tokens go, as far as half of all slots
        )
    ),
    SOURCES: Capability(inputs=(TensorSpec("source_length", "int64", ("batch",)),)),
    TAILS: Capability(),
    # A token's positions are its place in the row and what these add to it. A row without an image has zeros.
    AXES: Capability(
        inputs=(
            TensorSpec("shift", "int64", ("batch",)),  # of all axes, after a row's images
            TensorSpec("offsets", "int64", ("batch", 3, "width")),  # of time, height and width, beside that
        )
    ),
    WHOLE_IMAGES: Capability(),
}


@dataclass(frozen=True)
class Contract(Interface):
    """The numbers and states that fix a graph's interface; `inputs` and `outputs` spell them out."""

    layers: int  # that attend
    heads: int  # of their queries
    states: tuple[State, ...]  # in graph order
    vocab_size: int  # columns of the logits, padding included
    max_length: int  # longest sequence the positions allow
    dtype: str  # of weights; logits are always float32
    capabilities: tuple[str, ...] = ()  # names of those that this graph has
    adapters: Adapters | None = None  # the room of a second graph beside it, if there is one
    shards: int = 1  # of which this is one: so many devices run a call together, each with its share of the weights

    def __post_init__(self) -> None:
        least = {"layers": 0, "heads": 0} if self.recurrent else {}  # perhaps none attends
        for name in ("layers", "heads", "vocab_size", "max_length", "shards"):
            value = getattr(self, name)
            if type(value) is not int or value < least.get(name, 1):
                expected = "a whole number" if name in least else "a positive integer"
                raise ContractError(f"contract field {name} is {value!r}, expected {expected}")
        for name in self.capabilities:
            if name not in CAPABILITIES:
                raise ContractError(
                    f"contract lists the capability {name!r}, which this version does not know; update it"
                )
        if self.dtype not in DTYPE_BYTES:
            raise ContractError(f"contract dtype is {self.dtype!r}, expected float32, float16 or bfloat16")
        names = [state.name for state in self.states]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ContractError(f"contract lists the state {twice[0]!r} twice, expected each once; export it again")

    @classmethod
    def from_json(cls, fields: Any) -> "Contract":
        names = set(cls.__dataclass_fields__) - OPTIONAL
        if not isinstance(fields, dict) or set(fields) - OPTIONAL != names:
            found = sorted(fields) if isinstance(fields, dict) else fields
            raise ContractError(f"contract has the fields {found}, expected {sorted(names)}")
        states, capabilities = tuple(map(State.parse, fields["states"])), tuple(fields["capabilities"])
        own: dict[str, Any] = {"states": states, "capabilities": capabilities}
        if "adapters" in fields:
            own["adapters"] = Adapters.from_json(fields["adapters"])
        return cls(**fields | own)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON has them, each state as one line of text."""
        fields = asdict(self) | {"states": list(map(str, self.states)), "capabilities": list(self.capabilities)}
        del fields["adapters"]
        if self.adapters is not None:
            fields["adapters"] = self.adapters.to_json()
        if self.shards == 1:
            del fields["shards"]
        return fields

    def of_kind(self, kind: str) -> tuple[State, ...]:
        return tuple(state for state in self.states if state.kind == kind)

    def alike(self, kind: str) -> list[list[State]]:
        """Return the states of this kind, those of one shape and dtype together: one list for an ordinary model."""
        groups: dict[tuple[object, ...], list[State]] = {}
        for state in self.of_kind(kind):
            groups.setdefault((state.shape, state.dtype), []).append(state)
        return list(groups.values())

    @cached_property
    def cache_names(self) -> tuple[str, ...]:
        """The states with an entry for each token, in graph order: key_0, value_0, key_1, …"""
        return tuple(state.name for state in self.of_kind(TOKEN))

    @property
    def in_blocks(self) -> bool:
        """True if a table assigns blocks of the cache to rows, false if each row has memory of its own."""
        return BLOCKS in self.capabilities

    def with_blocks(self) -> "Contract":
        """Return the contract of an engine that runs this graph over a cache in blocks."""
        return replace(self, capabilities=(*self.capabilities, BLOCKS))

    def with_images(self, size: int) -> "Contract":
        """Return the contract of this graph if it reads entries of images of so many numbers among its tokens."""
        return replace(self, states=(*self.states, State(IMAGES, (size,), self.dtype, IMAGE)))

    def in_dtype(self, dtype: str) -> "Contract":
        """Return the contract of this graph in another dtype; states that had a dtype of their own keep it."""
        states = tuple(replace(one, dtype=dtype) if one.dtype == self.dtype else one for one in self.states)
        return replace(self, states=states, dtype=dtype)

    @property
    def rounded_to(self) -> str:
        return next((state.dtype for state in self.states if state.dtype in EIGHT_BITS), "")

    @cached_property
    def without_adapters(self) -> Self:
        return self if self.adapters is None else replace(self, adapters=None)

    @cached_property
    def kept(self) -> tuple[State, ...]:
        """The states that the caller keeps between two calls, in graph order."""
        return tuple(state for state in self.states if STATE_KINDS[state.kind].kept)

    @property
    def image_size(self) -> int:
        """The numbers of each entry of an image, 0 if the graph reads none."""
        return next((state.shape[0] for state in self.of_kind(IMAGE)), 0)

    def _memory(self, prefix: str, state: State) -> TensorSpec:
        if state.kind == IMAGE:
            return TensorSpec(f"{prefix}_{state.name}", state.dtype, ("entries", *state.shape))
        if state.kind == CALL:
            return TensorSpec(
                f"{prefix}_{state.name}", state.dtype, ("batch", "width" if prefix == "past" else "rows", *state.shape)
            )
        rows: Dim = "batch"
        capacity: Dim = STATE_KINDS[state.kind].capacity
        if self.in_blocks and state.kind == TOKEN:
            rows, capacity = "pool", BLOCK_TOKENS
        return TensorSpec(f"{prefix}_{state.name}", state.dtype, state.memory(rows, capacity))

    @cached_property
    def inputs(self) -> tuple[TensorSpec, ...]:
        tail = "tail" if TAILS in self.capabilities else "width"  # with the call's own tokens, which come last
        return (
            TensorSpec("input_ids", "int64", ("batch", "width")),
            TensorSpec("start", "int64", ("batch",)),
            # The tokens of a call may branch: each follows its ancestors alone. They may follow a tail of
            # entries that branch as well: the last ones before the call's own, of which the same is said.
            TensorSpec("depths", "int64", ("batch", tail)),  # their positions, from `start` on
            TensorSpec("ancestors", "bool", ("batch", "width", tail)),  # which of them a token sees
            TensorSpec("logit_rows", "int64", ("batch", "rows")),
            *(spec for name in self.capabilities for spec in CAPABILITIES[name].inputs),
            *(self._memory("past", state) for state in self.states),
            *(() if self.adapters is None else self.adapters.inputs(self.dtype, self.shards)),
        )

    @cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return (
            TensorSpec("logits", "float32", ("batch", "rows", self.vocab_size)),
            *(spec for name in self.capabilities for spec in CAPABILITIES[name].outputs),
            *(self._memory("present", state) for state in self.states if STATE_KINDS[state.kind].output),
        )

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Each output that must be bound to the memory of an input."""
        return {
            f"present_{state.name}": f"past_{state.name}" for state in self.states if STATE_KINDS[state.kind].in_place
        }

    @property
    def cache_bytes_per_token(self) -> int:
        return sum(state.bytes for state in self.of_kind(TOKEN))

    @property
    def cache_bytes_per_row(self) -> int:
        """The bytes that each row takes beside its tokens."""
        return sum(state.bytes for state in self.of_kind(ROW)) + SLOTS * sum(
            state.bytes for state in self.of_kind(WINDOW)
        )

    @property
    def source_bytes(self) -> int:
        """The bytes that each entry of a row's source takes."""
        return sum(state.bytes for state in self.of_kind(SOURCE))

    @property
    def recurrent(self) -> bool:
        """True if some layer keeps a state that absorbs tokens, so that no call may begin before them."""
        return RECURRENT in self.capabilities

    def cache_bytes(self, rows: int, tokens: int) -> int:
        """Return what so many rows of so many tokens each take."""
        return rows * (tokens * self.cache_bytes_per_token + self.cache_bytes_per_row)
