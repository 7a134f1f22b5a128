"""The operators between shards: each waits for all shards of the group that the process is in."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

NAMESPACE = "trt_spec_between"  # of torch's operators that are no kernels


def _sum(x: Tensor) -> Tensor:
    whole = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(whole)
    return whole


def _gather(x: Tensor, shards: int) -> Tensor:
    """Return the parts of all shards along the last axis; only the first shard gets them."""
    own = x.contiguous()
    parts = [torch.empty_like(own) for _ in range(shards)] if dist.get_rank() == 0 else None
    dist.gather(own, parts, dst=0)
    return _side_by_side(x, shards) if parts is None else torch.cat(parts, -1)


def _side_by_side(x: Tensor, shards: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] * shards))


def _declare(name: str, schema: str, shape: Callable[..., Tensor], run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    full = f"{NAMESPACE}::{name}"
    torch.library.define(full, schema)
    for device in ("cpu", "cuda"):
        torch.library.impl(full, device, run)
    torch.library.register_fake(full, shape)
    operator: Callable[..., Tensor] = getattr(torch.ops.trt_spec_between, name)
    return operator


sum_shards = _declare("sum_shards", "(Tensor x) -> Tensor", torch.empty_like, _sum)
gather_shards = _declare("gather_shards", "(Tensor x, int shards) -> Tensor", _side_by_side, _gather)


def best_of_shards(x: Tensor, shards: int, rank: int, vocab_size: int, size: int) -> Tensor:
    """Return logits of so large a size, of which the best token of each shard is there, and all others are -inf.

    Whoever picks the best of them picks that of all, ties too. Each shard sends two numbers for a token.
    """
    begin = rank * x.shape[-1]
    best, place = x[..., : vocab_size - begin].max(-1, keepdim=True)  # NaN is the largest
    found = gather_shards(torch.cat([best.double(), (place + begin).double()], -1), shards)
    ids = found[..., 1::2].long().clamp(0, size - 1)  # only the first shard has them
    return x.new_full((*x.shape[:-1], size), -torch.inf).scatter(-1, ids, found[..., ::2].to(x.dtype))
