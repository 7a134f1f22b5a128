"""The base of every engine, and the step that an engine makes of a graph and the caller's tensors."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .contract import PREFILL_WIDTH, WIDEST_STEP, Contract, Part

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Step:
    """A call of the graph on the caller's own tensors, by contract name: fill the inputs, `run()`, read the outputs."""

    inputs: "Mapping[str, Tensor]"
    outputs: "Mapping[str, Tensor]"
    run: Callable[[], None]

    @property
    def input_ids(self) -> "Tensor":  # [B, S] int64
        return self.inputs["input_ids"]

    @property
    def start(self) -> "Tensor":  # [B] int64, the cache row of each first token
        return self.inputs["start"]

    @property
    def logits(self) -> "Tensor":  # [B, R, V] float32, or of the engine's `logits_dtype`, of the last R tokens of S
        return self.outputs["logits"]


class Engine:
    """A graph opened on a device. The caller owns all tensors; the engine writes the cache in place.

    Every engine has a contract and a device and makes steps. It states only what differs from the defaults here.
    """

    contract: Contract  # of an encoder, which is asked for its interface alone, an EncoderContract
    device: str
    verify_width = WIDEST_STEP  # a step gives logits for at most so many tokens
    read_width = WIDEST_STEP  # and reads at most so many of each row, unless there is one row alone
    takes_trees = True  # else the tokens of a step must be a line
    takes_tails = True  # else a step gets its own tokens alone, even if its graph could take more
    reads_together = False  # one step may read the prompts of several rows, however long
    static_capacity = False  # the cache must have its full capacity from the start
    reads_prefixes = False  # a step may be given the first entries of longer buffers, and reads no others
    reads_live = False  # a round's step reads the entries that its tokens may see alone, however long the buffers are
    logits_dtype = "float32"  # the type that its logits have before they are widened, in which it gives them, too
    own_threads = False  # computes on threads of its own; torch's would fight them for cores

    def step(self, inputs: "Mapping[str, Tensor]", outputs: "Mapping[str, Tensor]") -> Step:
        """Make a step on these contiguous tensors, all that the contract lists; prefixes of a cache may be strided."""
        raise NotImplementedError

    def picking(self, vocab_size: int) -> "Engine":
        """Return this engine for steps of whose logits the best of the first so many tokens alone need be right."""
        return self

    def runs(self, width: int, rows: int) -> bool:
        """Whether a step may read so many tokens of each row and give so many logits, whatever the batch."""
        return width <= self.read_width and rows <= self.verify_width

    def prefill_widths(self, tokens: int) -> list[int]:
        """Return the widths of the steps in which it best reads this many tokens of a prompt."""
        return chunks(tokens, PREFILL_WIDTH)

    def reserve(self, rows: int, capacity: int) -> None:
        """Refuse a cache of so many rows and this capacity if steps of some batch up to it could not run."""

    def step_bytes(self, rows: int, capacity: int) -> int:
        """Return the most bytes that a step of a round takes meanwhile for what it alone reads, where that is known."""
        return 0

    def capturable(self) -> bool:
        """Say whether a CUDA graph of torch's current stream may record the steps that have run."""
        return False

    def everywhere(self, memory: "Tensor") -> "Tensor":
        """Let every device that the engine runs on have memory like this; what is done to the result is done there."""
        return memory

    def put(self, memory: "Tensor", numbers: "Tensor", axis: int = 0, parts: Sequence[Part] = ()) -> None:
        """Write to memory that is everywhere: each device gets its share of an axis in parts, else all numbers."""
        memory.copy_(numbers)

    def require(self) -> None:
        """Raise `EngineEnded` if one of its other devices has gone."""

    def gone(self) -> str:
        """Say which of its other devices has gone, if one has; any thread may ask, also while a step waits for it."""
        return ""

    def recording(self, record: object) -> "AbstractContextManager[None]":
        """Let its other devices record, too, what they do until the block ends."""
        return nullcontext()

    def replay(self, record: object) -> None:
        """Let its other devices repeat what they have recorded; the first one's part is the caller's."""

    def open_adapters(self) -> None:
        """Open the graph that has room for adapters, before a step has some."""

    def settle(self) -> None:
        """Prepare at once for steps like those so far, if it would otherwise do so little by little."""

    def close(self) -> None:
        """Free its memory and threads; no step of it runs afterwards."""


def chunks(tokens: int, most: int) -> list[int]:
    """Return the widths in which to read this many tokens, at most `most` at a time."""
    return [min(most, tokens - begin) for begin in range(0, tokens, most)]
