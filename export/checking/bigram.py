"""Count what a bigram would do in a head's place: it costs nothing, so a head must be better to be worth its steps."""

from typing import Any

import torch
from torch import Tensor

from .oracle import hidden_states
from .quality import Sample

FEWEST = 1024  # tokens, of which the last quarter is measured: of fewer the overlap is known to a few hundredths alone
COUNTED = 3  # quarters of the text
WINDOW = 256  # tokens that are read together


@torch.no_grad()
def bigram_overlap(target: Any, sample: Sample) -> float | None:
    """Return the overlap of a bigram's distribution with a target's at temperature 1; None for a short text.

    It is counted on the first part of the text and measured on the rest.
    """
    count = len(sample.tokens) * COUNTED // 4
    if len(sample.tokens) < FEWEST:
        return None
    bigram, rest = Bigram(torch.tensor(sample.tokens[:count]), sample.vocab_size), sample.tokens[count:]
    total = 0.0
    for begin in range(0, len(rest), WINDOW):
        window = rest[begin : begin + WINDOW]
        distributions = hidden_states(target, torch.tensor([window]))[1][0, :, : sample.vocab_size].softmax(-1)
        total += sum(
            float(torch.minimum(bigram.after(one), distribution).sum())
            for one, distribution in zip(window, distributions, strict=True)
        )
    return total / len(rest)


class Bigram:
    """Which tokens follow a token, by Witten and Bell's rule.

    Those that were seen C times after it, T different ones, have C / (C + T) of the distribution. The rest goes by how
    often each token was seen at all, and that leaves a part to all tokens alike by the same rule.
    """

    def __init__(self, tokens: Tensor, vocab_size: int) -> None:
        self._before, self._after = tokens[:-1], tokens[1:]
        self._alone = shared(tokens, torch.full((vocab_size,), 1 / vocab_size))

    def after(self, token: int) -> Tensor:
        """Return the distribution [V] of what follows a token."""
        return shared(self._after[self._before == token], self._alone)


def shared(seen: Tensor, shorter: Tensor) -> Tensor:
    """Return the distribution of what was seen, which leaves to the `shorter` context what may come that was not."""
    counts = torch.bincount(seen, minlength=len(shorter))
    kinds = int((counts > 0).sum())
    return (counts + kinds * shorter) / (len(seen) + kinds) if kinds else shorter
