"""The angles of rotations become tables of all positions, from which one operator reads those of a call.

What a graph computes is found by trial: it must be what the tables say at every position, of lines and of trees, also
beyond the last one.
"""

import torch
from torch import Tensor

from ...contract import TAILS, Contract
from .rewriting import Rewriting, fused
from .trial import computed

MOST_NUMBERS = 1 << 24  # of a table: 131,072 positions with angles for heads of 256 numbers
TRIALS, BATCH, WIDTH, LISTED = 3, 3, 4, 6
BEYOND = 64  # positions after the last one


def fuse(graph: Rewriting) -> int:
    if not isinstance(graph.contract, Contract):
        return 0
    fired = 0
    for values in dict.fromkeys(node.inputs[1:3] for node in graph.all("RotaryEmbedding")):
        makers = [graph.maker(value) for value in values]
        old = [maker for maker in makers if maker is not None and len(maker.outputs) == 1]
        if len(old) != 2 or (tables := _tables(graph, graph.contract, values)) is None:
            continue
        names = [f"{value}.table" for value in values]
        graph.constants |= dict(zip(names, tables, strict=True))
        graph.replace(old, fused("Angles", ["input_ids", "start", "depths", *names], values))
        fired += 1
    return fired


def _tables(graph: Rewriting, contract: Contract, values: tuple[str, ...]) -> list[Tensor] | None:
    """Return what these values are at each position [positions, D / 2], or None if they follow from more than that."""
    positions = contract.max_length
    first = _found(graph, values, torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64), 1)
    if first is None or any(each.dim() != 3 or positions * each.shape[2] > MOST_NUMBERS for each in first):
        return None
    whole = _found(graph, values, torch.zeros(1, dtype=torch.int64), torch.arange(positions)[None], positions)
    if whole is None:
        return None
    tables = [each[0].contiguous() for each in whole]
    listed = LISTED if TAILS in contract.capabilities else WIDTH
    for seed in range(TRIALS):
        random = torch.Generator().manual_seed(seed)
        start = torch.randint(positions + BEYOND, (BATCH,), generator=random)
        depths = torch.randint(WIDTH, (BATCH, listed), generator=random)
        found = _found(graph, values, start, depths, WIDTH)
        place = (start[:, None] + depths[:, -WIDTH:]).clamp(max=positions - 1)
        if found is None or not all(
            torch.allclose(own, table[place], rtol=0, atol=2 * torch.finfo(own.dtype).eps)
            for own, table in zip(found, tables, strict=True)
        ):
            return None
    return tables


def _found(graph: Rewriting, values: tuple[str, ...], start: Tensor, depths: Tensor, width: int) -> list[Tensor] | None:
    sizes = {"batch": len(start), "width": width, "tail": depths.shape[1]}
    found = [computed(graph, value, {"start": start, "depths": depths}, sizes) for value in values]
    return None if any(each is None or each.is_meta for each in found) else [e for e in found if e is not None]
