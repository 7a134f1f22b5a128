"""What decays leave of tokens along the paths after them: sums and differences of their logarithms, never quotients.

A decay is of a head, or of each channel of its keys. Channels that decay apart weigh in every pair of tokens by
themselves: the products of keys and queries cannot be taken first.
"""

import torch
from torch import Tensor

NOTHING = -128.0  # the logarithm of less than any float32
PARTS = 64  # of one, in which whole decays are counted: sums of those are exact
PIECE = 32  # channels whose weights are in memory at once


class Decays:
    """The decays of tokens, as logarithms [B, H, N, C], along the paths that they see [B, N, N].

    C is 1, or as many as the channels of a key.
    """

    def __init__(self, logarithms: Tensor, sees: Tensor) -> None:
        self._sees = sees[:, None, :, :, None]  # [B, 1, N, N, 1]
        bounded = logarithms.clamp(min=NOTHING)
        # After strong decays one sum would have no digits left for what weak ones add to it.
        whole = torch.floor(bounded * PARTS) / PARTS
        self._parts = whole, bounded - whole
        self._sums = [sees[:, None].to(part.dtype) @ part for part in self._parts]
        self.of_state = (self._sums[0] + self._sums[1]).exp()  # [B, H, N, C], after each token

    def products(self, query: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Multiply what is left of each key [B, H, N, D] by the keys that see it and the queries [B, H, S, D].

        Return that of keys [B, H, N, N] and of queries [B, H, S, N].
        """
        before = keys.shape[2] - query.shape[2]
        if self.of_state.shape[3] == 1:
            seen = self._seen(*self._sums)[..., 0]
            return keys @ keys.transpose(2, 3) * seen, query @ keys.transpose(2, 3) * seen[:, :, before:]
        asking = torch.cat([torch.zeros_like(keys[:, :, :before]), query], 2)
        readers = torch.stack([keys, asking], 4)  # [B, H, N, D, 2]
        pieces = zip(*(torch.split(each, PIECE, 3) for each in (readers, keys, *self._sums)), strict=True)
        each = [self._seen(whole, rest) * key[:, :, None] @ reader for reader, key, whole, rest in pieces]
        found = sum(each[1:], each[0])  # [B, H, N, N, 2]
        return found[..., 0], found[:, :, before:, :, 1]

    def at_end(self, absorbed: Tensor) -> tuple[Tensor, Tensor]:
        """Return what those absorbed [B, N] leave of the state [B, H, 1, C] and of each token [B, H, N, C]."""
        there = absorbed[:, None, :, None]
        ends = [torch.where(there, part, 0.0).sum(2, keepdim=True) for part in self._parts]
        whole, rest = (end - sums for end, sums in zip(ends, self._sums, strict=True))
        of_keys = torch.where(there, whole + rest, -torch.inf).exp()
        return (ends[0] + ends[1]).exp(), of_keys

    def _seen(self, *sums: Tensor) -> Tensor:
        """Return what is left of each token where others see it [B, H, N, N, C], else nothing."""
        whole, rest = (each[:, :, :, None] - each[:, :, None] for each in sums)
        # Along a path sums only fall. Padding may see a token without those before it, and must stay a number.
        since = (whole + rest).clamp(max=0)
        return torch.where(self._sees, since, -torch.inf).exp()
