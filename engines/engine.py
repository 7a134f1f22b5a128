"""The protocol of every engine: make a step over fixed tensors, which the graph's contract names, and run it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from .contract import BLOCK_TOKENS, CAPABILITIES, Contract, TensorSpec

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
    def logits(self) -> "Tensor":  # [B, R, V] float32, of the last R tokens of S
        return self.outputs["logits"]


class Engine(Protocol):
    """A graph opened on a device. The caller owns all tensors; the engine writes the cache in place."""

    contract: Contract
    device: str
    static_capacity: bool  # the cache must have its full capacity from the start
    reads_prefixes: bool  # the cache of a step may be the first entries of longer buffers, and no others are read
    own_threads: bool  # computes on threads of its own; torch's would fight them for cores
    verify_width: int  # the most tokens in a step for which it gives logits
    takes_trees: bool  # else the tokens of a step must be a line
    reads_together: bool  # one step may read the prompts of several rows, however long

    def reserve(self, rows: int, capacity: int) -> None:
        """Refuse caches of up to this many rows of this capacity if no step could run over them."""

    def step(self, inputs: "Mapping[str, Tensor]", outputs: "Mapping[str, Tensor]") -> Step:
        """Make a step on these contiguous tensors, all that the contract lists; prefixes of a cache may be strided."""

    def prefill_widths(self, tokens: int) -> list[int]:
        """Return the widths of the steps in which it reads this many tokens best."""

    def capturable(self) -> bool:
        """Whether the steps that have run may be recorded in a CUDA graph of torch's current stream."""

    def settle(self) -> None:
        """Prepare now what it would otherwise prepare over time, for steps like those so far."""

    def close(self) -> None: ...


def chunks(tokens: int, most: int) -> list[int]:
    """Return the widths in which to read this many tokens, at most `most` at a time."""
    return [min(most, tokens - begin) for begin in range(0, tokens, most)]


def last_rows(batch: int, width: int, rows: int, device: str) -> "Tensor":
    """Return which rows of a step give logits: the last ones."""
    import torch

    return torch.arange(width - rows, width, device=device).expand(batch, rows).contiguous()


def line(batch: int, width: int, device: str) -> "dict[str, Tensor]":
    """Return the depths and ancestors of tokens that follow one another."""
    import torch

    depths = torch.arange(width, device=device)
    return {
        "depths": depths.expand(batch, width).contiguous(),
        "ancestors": (depths <= depths[:, None]).expand(batch, width, width).contiguous(),
    }


def make_step(
    engine: Engine, cache: "Mapping[str, Tensor]", inputs: "Mapping[str, Tensor]", outputs: "Mapping[str, Tensor]"
) -> Step:
    """Make a step over the rows of `cache`; all tensors go by contract name.

    `inputs` and `outputs` may leave out what follows from the rest: that the tokens are a line, which rows give
    logits, the cache, and what a capability can fill by itself.
    """
    import torch

    contract, device = engine.contract, engine.device
    (batch, width), rows = inputs["input_ids"].shape, outputs["logits"].shape[1]
    buffers = {name: cache[name] for name in contract.cache_names}
    inputs = {f"past_{name}": tensor for name, tensor in buffers.items()} | dict(inputs)
    if contract.in_blocks:
        inputs["blocks"] = cache["blocks"]
    if "depths" not in inputs:
        inputs |= line(batch, width, device)
    inputs.setdefault("logit_rows", last_rows(batch, width, rows, device))
    outputs = {f"present_{name}": tensor for name, tensor in buffers.items()} | dict(outputs)
    sizes = {"batch": batch, "width": width, "rows": rows}

    def blank(spec: TensorSpec) -> "Tensor":
        shape = [sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape]
        return torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=device)

    fills = []
    for capability in (CAPABILITIES[name] for name in contract.capabilities):
        absent = [spec for spec in capability.inputs if spec.name not in inputs]
        if absent and capability.fill is not None:
            fills.append(capability.fill)
        inputs |= {spec.name: blank(spec) for spec in absent}
        outputs |= {spec.name: blank(spec) for spec in capability.outputs if spec.name not in outputs}
    step = engine.step(inputs, outputs)
    if not fills:
        return step

    def run() -> None:
        for fill in fills:
            fill(inputs)
        step.run()

    return Step(inputs, outputs, run)


def blank_step(
    engine: Engine, cache: "Mapping[str, Tensor]", first_row: int, batch: int, width: int, rows: int
) -> Step:
    """Make a step on new tensors, all zero, over the rows of `cache` from `first_row` on."""
    import torch

    inputs = {
        "input_ids": torch.zeros(batch, width, dtype=torch.int64, device=engine.device),
        "start": torch.zeros(batch, dtype=torch.int64, device=engine.device),
    }
    logits = torch.zeros(batch, rows, engine.contract.vocab_size, device=engine.device)
    return make_step(engine, cache_rows(engine.contract, cache, first_row, batch), inputs, {"logits": logits})


def cache_rows(contract: Contract, cache: "Mapping[str, Tensor]", first_row: int, rows: int) -> "dict[str, Tensor]":
    """Return the part of a cache that a step over these rows takes."""
    own = ("blocks",) if contract.in_blocks else contract.cache_names  # what has a part for each row
    return {name: tensor[first_row : first_row + rows] if name in own else tensor for name, tensor in cache.items()}


def blank_cache(contract: Contract, rows: int, capacity: int, device: str = "cpu") -> "dict[str, Tensor]":
    """Make a cache by contract name, all zero, in which every row has its memory."""
    import torch

    size, table = (rows, contract.kv_heads, capacity, contract.head_dim), {}
    if contract.in_blocks:
        each = -(-capacity // BLOCK_TOKENS)
        size = (1 + rows * each, contract.kv_heads, BLOCK_TOKENS, contract.head_dim)  # the first is spare
        table = {"blocks": torch.arange(1, 1 + rows * each, dtype=torch.int32, device=device).view(rows, each)}
    dtype = getattr(torch, contract.dtype)
    return {name: torch.zeros(size, dtype=dtype, device=device) for name in contract.cache_names} | table
