"""Randomness as a pure function: Philox4x32-10 of the request's seed, the token's index and the draw's purpose.

There is no generator state, only integer torch operations: a draw does not depend on its neighbours in the batch, on
its row, on the device or on when it is made.
"""

from functools import cache

import torch
from torch import Tensor

from ...engines import MAX_DRAFT_LENGTH
from .place import on_host

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF

CACHED = 2**16  # counters at a time on a CPU: more leave its caches, and take up to three times as long

_GUMBEL, _UNIFORM = 0, 1  # the last counter word: the purpose of a draw


@cache
def constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Make the constants once, before any round: to copy numbers from the host to a GPU would make it wait."""
    return torch.tensor([_MULTIPLIERS, _MULTIPLIERS[::-1]], device=device), torch.tensor([_WEYL], device=device)


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Return four random words for each counter; `counter` [4, …] and `key` [2, …] hold 32-bit words as int64."""
    device, ones = counter.device, [1] * (counter.dim() - 1)
    multipliers, weyl = (constant.view(-1, 2, *ones) for constant in constants(device))
    keys = (key + torch.arange(_ROUNDS, device=device).view(_ROUNDS, 1, *ones) * weyl) & _MASK
    keys[0::2] = keys[0::2].flip(1)  # words 0 and 2 change places every round instead of being copied back
    even, odd = counter[0::2], counter[1::2]
    for turn in range(_ROUNDS):
        # A product of two 32-bit words wraps in int64 but keeps all of its 64 bits.
        product = even * multipliers[turn % 2]
        even = (product >> 32).bitwise_and_(_MASK).bitwise_xor_(odd.flip(0)).bitwise_xor_(keys[turn])
        odd = product.bitwise_and_(_MASK)
    return torch.stack([even, odd], dim=1).flatten(0, 1)


def gumbel(words: Tensor) -> Tensor:
    """Return standard Gumbel noise −log(−log1p(−v)); v is finest where noise is large and never 1, so it is finite."""
    v = words.float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()


def uniform(high: Tensor, low: Tensor) -> Tensor:
    """Turn two words into a float64 in (0, 1), far enough from 1 that u · x < x for every x."""
    return (((high << 16) | (low >> 16)).double() + 0.5) * 2.0**-48


def gumbels(seed: Tensor, index: Tensor, size: int) -> Tensor:
    """Return noise [A, W, size] for the tokens at `index` [A, W]; one seed [A, 2] gives one noise per index."""
    quads = torch.arange(-(-size // 4), device=index.device)
    at_once = max(1, CACHED // index.numel()) if on_host(index.device) else len(quads)
    pieces = [gumbel(_words(seed, index, some)) for some in torch.split(quads, at_once)]
    return (torch.cat(pieces, -1) if len(pieces) > 1 else pieces[0])[..., :size]


def _words(seed: Tensor, index: Tensor, quads: Tensor) -> Tensor:
    """Return four random words for each of these groups of four tokens, [A, W, 4 · quads]."""
    counter = torch.zeros(4, *index.shape, len(quads), dtype=torch.int64, device=index.device)
    counter[0] = quads
    counter[1] = index[:, :, None]
    counter[3] = _GUMBEL
    return philox(counter, seed.T[:, :, None, None]).permute(1, 2, 3, 0).flatten(2)


def uniforms(seed: Tensor, length: Tensor, width: int) -> Tensor:
    """Return two uniforms [N, width, 2] per token of a round that begins at `length` [N]: to draw it and to test it.

    They are keyed by where the round begins, so that a draw discarded in one round is never used again in another. Of
    several seeds [R, 2] they are [R, N, width, 2].
    """
    counter = torch.zeros(4, *seed.shape[:-1], len(length), width, dtype=torch.int64, device=length.device)
    counter[0] = torch.arange(width, device=length.device)
    counter[1] = length[:, None]
    counter[3] = _UNIFORM
    words = philox(counter, seed.movedim(-1, 0)[..., None, None])  # [4, …, N, width]
    return torch.stack([uniform(words[0], words[1]), uniform(words[2], words[3])], -1)


def of_line(number: int, length: int) -> slice:
    """Return which of the uniforms beyond the first line's belong to a further line."""
    begin = (number - 1) * MAX_DRAFT_LENGTH
    return slice(begin, begin + length)
