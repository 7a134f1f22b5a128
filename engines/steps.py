"""Makes steps for any engine, adding the tensors that the caller leaves out, and blank caches for them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .contract import (
    ADAPTER,
    BLOCK_TOKENS,
    CAPABILITIES,
    GRANULE,
    IMAGES,
    ROW,
    SLOTS,
    SOURCE,
    SOURCES,
    STATE_KINDS,
    WINDOW,
    Contract,
    TensorSpec,
)
from .engine import Engine, Step

if TYPE_CHECKING:
    from torch import Tensor


WITH_CACHE = ("blocks", "source_length")  # inputs that belong to rows as their cache does


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
    engine: Engine,
    cache: "Mapping[str, Tensor]",
    inputs: "Mapping[str, Tensor]",
    outputs: "Mapping[str, Tensor]",
    *,
    advances: bool = True,
) -> Step:
    """Make a step over the rows of `cache`; all tensors go by contract name.

    `inputs` and `outputs` need not name everything. Without `depths` and `ancestors` the tokens are a line, without
    `logit_rows` the last ones give logits, without `adapter` no row has one. The cache is added, too, and zeros for
    what a capability or a state of a call needs. A state of a row is computed beside the cache and copied into it after
    the call, since a graph may read it to its end, if the step `advances` such states.
    """
    import torch

    contract = engine.contract if ADAPTER in inputs else engine.contract.without_adapters
    device = engine.device
    (batch, width), rows = inputs["input_ids"].shape, outputs["logits"].shape[1]
    buffers = {state.name: cache[state.name] for state in contract.kept}
    inputs = {f"past_{name}": tensor for name, tensor in buffers.items()} | dict(inputs)
    for name in WITH_CACHE:
        if name in cache:
            inputs[name] = cache[name]
    if "depths" not in inputs:
        inputs |= line(batch, width, device)
    inputs.setdefault("logit_rows", last_rows(batch, width, rows, device))
    made = [state.name for state in contract.kept if STATE_KINDS[state.kind].output]
    outputs = {f"present_{name}": buffers[name] for name in made} | dict(outputs)
    replaced = {}
    for state in contract.of_kind(ROW):
        found = outputs[f"present_{state.name}"]
        replaced[state.name] = torch.empty_like(found) if found is buffers[state.name] else found
        outputs[f"present_{state.name}"] = replaced[state.name]
    sizes = {"batch": batch, "width": width, "tail": width, "rows": rows, "pending": 1, "entries": 1}

    def blank(spec: TensorSpec) -> "Tensor":
        shape = [sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape]
        return torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=device)

    def unread(spec: TensorSpec) -> "Tensor":
        """Return what no token reads unless it is filled: entries of images, which no device need send to others."""
        return engine.everywhere(blank(spec)) if spec.name == f"past_{IMAGES}" else blank(spec)

    fills = []
    for capability in (CAPABILITIES[name] for name in contract.capabilities):
        if capability.fill is not None and any(spec.name not in inputs for spec in capability.inputs):
            fills.append(capability.fill)
    inputs |= {spec.name: unread(spec) for spec in contract.inputs if spec.name not in inputs}
    outputs |= {spec.name: blank(spec) for spec in contract.outputs if spec.name not in outputs}
    step = engine.step(inputs, outputs)
    if not advances:
        replaced = {}
    if not fills and not replaced:
        return step

    def run() -> None:
        for fill in fills:
            fill(inputs)
        step.run()
        for name, found in replaced.items():
            buffers[name].copy_(found)

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
    shared = contract.cache_names if contract.in_blocks else ()  # all else has a part for each row
    return {name: tensor if name in shared else tensor[first_row : first_row + rows] for name, tensor in cache.items()}


def blank_cache(contract: Contract, rows: int, capacity: int, device: str = "cpu") -> "dict[str, Tensor]":
    """Make a cache by contract name, all zero, in which every row has its memory, and a source of few entries."""
    import torch

    table, size = dict[str, "Tensor"](), (rows, capacity)
    if SOURCES in contract.capabilities:
        table["source_length"] = torch.full((rows,), GRANULE, device=device)
    if contract.in_blocks:
        each = -(-capacity // BLOCK_TOKENS)
        size = 1 + rows * each, BLOCK_TOKENS  # the first is spare
        table["blocks"] = torch.arange(1, 1 + rows * each, dtype=torch.int32, device=device).view(rows, each)
    sizes = {WINDOW: (rows, SLOTS), SOURCE: (rows, GRANULE)}
    return {
        state.name: torch.zeros(
            state.memory(*sizes.get(state.kind, size)),
            dtype=getattr(torch, state.dtype),
            device=device,
        )
        for state in contract.kept
    } | table
