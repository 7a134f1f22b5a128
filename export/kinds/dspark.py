"""DSpark: a block of DFlash whose tokens follow one another, and which says how sure it is of each.

Its Markov head adds to the logits of a place what the token before it is worth. Its confidence is the chance that a
place's token stands if those before it do. It reads the hidden state of the place and the token before it, so it is
known before the place's own token is drawn.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .dflash import DFlash


class MarkovHead(nn.Module):
    def __init__(self, vocab: int, rank: int, draft_vocab: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab, bias=False)


class ConfidenceHead(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = nn.Linear(inputs, 1)


class DSpark(DFlash):
    def __init__(self, *parts: Any, rank: int, confidence: int) -> None:
        """Make a head whose Markov head has this rank; its confidence reads so many numbers, 0: it has none."""
        super().__init__(*parts)
        self.markov_head = MarkovHead(self.config.vocab_size, rank, self.lm_head.out_features)
        self.confidence_head = ConfidenceHead(confidence) if confidence else None

    def following(self, logits: Tensor, before: Tensor) -> Tensor:
        """Return the logits [..., V] of places behind these tokens [...]."""
        added = self.markov_head.markov_w2(self.markov_head.markov_w1(before))
        if added.shape[-1] != logits.shape[-1]:
            added = torch.cat([added, torch.zeros_like(added[..., :1])], -1).index_select(-1, self.places)
        found: Tensor = logits + added
        return found

    def confidence(self, states: Tensor, before: Tensor) -> Tensor:
        """Return how likely tokens are to stand [...] behind these [...], by the hidden states of their places."""
        assert self.confidence_head is not None
        proj = self.confidence_head.proj
        read = torch.cat([states, self.markov_head.markov_w1(before)], -1)[..., : proj.in_features]
        sure: Tensor = proj(read)[..., 0].sigmoid()
        return sure

    def tables(self) -> dict[str, Tensor]:
        """Return what a round reads of it beside its graph; without confidence, that has no weights."""
        own, count = self.markov_head, self.lm_head.out_features
        tokens = torch.zeros(count, dtype=torch.int64)
        known = self.places < count
        tokens[self.places[known]] = known.nonzero()[:, 0]
        sure = self.confidence_head
        return {
            "before": own.markov_w1.weight.float(),
            "after": own.markov_w2.weight.t().float().contiguous(),
            "tokens": tokens,
            "confidence": torch.zeros(0) if sure is None else sure.proj.weight[0].float(),
            "confidence_bias": torch.zeros(1) if sure is None else sure.proj.bias.float(),
        }
