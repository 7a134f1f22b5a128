"""Heads that each read the target's last hidden state and say the token of one place: one pass for all proposals.

Head i says what stands i + 2 places behind the token whose hidden state it reads: the next place is the target's own.
So none of them knows what the others have said.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..tracing.modules import only_rows


class ResidualBlocks(nn.Module):
    """A head of Medusa, before its projection: layers that each add to what they read."""

    def __init__(self, hidden: int, layers: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden, bias=bias) for _ in range(layers))

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = hidden + nn.functional.silu(layer(hidden))
        return hidden


class FeedForward(nn.Module):
    """A head of blockwise parallel decoding, before the target's own projection: one hidden layer with a residual."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, hidden: Tensor) -> Tensor:
        changed: Tensor = self.down(nn.functional.relu(self.up(hidden)))
        return hidden + changed


class ParallelHeads(PreTrainedModel):  # type: ignore[misc]
    """All heads of a target; their vocabulary projections are their own, or one that all share."""

    def __init__(self, kind: str, blocks: Sequence[nn.Module], hidden: int, vocab: int, own_projections: bool) -> None:
        config = PreTrainedConfig()
        config.model_type = kind
        super().__init__(config)
        self.blocks = nn.ModuleList(blocks)
        self.lm_heads = nn.ModuleList(
            nn.Linear(hidden, vocab, bias=False) for _ in range(len(blocks) if own_projections else 1)
        )

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states [B, heads, hidden] of heads that read one hidden state [B, hidden], and their logits."""
        states = torch.stack([block(hidden) for block in self.blocks], 1)
        if len(self.lm_heads) == 1:
            return states, self.lm_heads[0](states)
        each = [project(states[:, place]) for place, project in enumerate(self.lm_heads)]
        return states, torch.stack(each, 1)

    def traced(self) -> nn.Module:
        return TracedParallel(self)


class TracedParallel(nn.Module):
    """`(input_ids, start, depths, ancestors, logit_rows, past_hidden) -> (logits, present_hidden)`.

    The heads read the last token of each row. `logit_rows` says which heads speak; for what lies beyond, the last does.
    """

    def __init__(self, heads: ParallelHeads) -> None:
        super().__init__()
        self.heads = heads

    def forward(
        self,
        input_ids: Tensor,
        start: Tensor,
        depths: Tensor,
        ancestors: Tensor,
        logit_rows: Tensor,
        past_hidden: Tensor,
    ) -> tuple[Tensor, ...]:
        states, logits = self.heads(past_hidden[:, -1])
        speaking = logit_rows.clamp(max=states.shape[1] - 1)
        return only_rows(speaking, logits).float(), only_rows(speaking, states)
