"""Medusa and blockwise heads: each reads the target's last hidden state and says the token of one place.

All share the target's vocabulary projection, which stays as it is. Medusa's begin as the target's own distribution of
the next token, since a layer of theirs can only add, and blockwise ones with what the best linear map foretells of the
hidden state of their place.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ....export.kinds.parallel import FeedForward, ParallelHeads, ResidualBlocks
from ...training_settings import HEADS, HeadSettings
from ..learning import NEGLIGIBLE
from .lesson import LATER, Lesson, missed, over
from .spoken import Rows, Spoken

MEDUSA_LAYERS = 2  # of a head: one learns less in as many minutes
SLOTS = 4  # one in so many is learned from in a step: more and cheaper steps teach more
MEASURED = 256  # rows from which they begin
RIDGE = 1e-3  # by which the linear map is held back, beside inputs of size 1
SHARPER = 1.3  # a mean of hidden states says less than they do
PRIMED = 1 / 3  # rate of what begins with a linear map


class ParallelLesson(Lesson[ParallelHeads]):
    @property
    def layers(self) -> tuple[int, ...]:
        return ()

    @abstractmethod
    def block(self, settings: HeadSettings, read: Tensor, wanted: Tensor) -> nn.Module:
        """Return what a head is before its projection; of what it reads [N, H] follows what is wanted [N, H]."""

    def begin(self, spoken: Spoken, settings: HeadSettings) -> ParallelHeads:
        vocab_size, width = self.teacher.projection.shape
        last = spoken.rows(spoken.learned[:MEASURED]).last
        blocks = [
            self.block(settings, last[:, :-ahead].flatten(0, 1), last[:, ahead:].flatten(0, 1))
            for ahead in range(1, 1 + (settings.heads or HEADS))
        ]
        heads = ParallelHeads(settings.kind, blocks, width, vocab_size, own_projections=False)
        heads.to(self.teacher.device, torch.float32)
        heads.lm_heads[0].weight = nn.Parameter(self.teacher.projection, requires_grad=False)
        return heads

    def rates(self, head: ParallelHeads) -> list[tuple[Tensor, float]]:
        return []

    def loss(self, head: ParallelHeads, rows: Rows, done: float, draw: Any) -> Tensor:
        distributions, width = self.teacher.logits(rows.last).softmax(-1), rows.tokens.shape[1]
        begins = int(torch.randint(min(SLOTS, width - len(head.blocks)), (1,), generator=draw))
        slots = torch.arange(begins, width, SLOTS, device=distributions.device)
        total, weights = torch.zeros((), device=distributions.device), 0.0
        for place in range(len(head.blocks)):
            read = slots[slots < width - 1 - place]
            log_q = _logits(head, place, rows.last[:, read]).log_softmax(-1)
            total = total + LATER**place * missed(distributions[:, read + place + 1], log_q, over(done)).mean()
            weights += LATER**place
        return total / weights

    def distributions(self, head: ParallelHeads, rows: Rows, places: int) -> Iterator[tuple[Tensor, Tensor]]:
        slots = torch.arange(rows.tokens.shape[1], device=rows.last.device)
        for place in range(min(places, len(head.blocks))):
            whose = slots[place + 1 :]
            yield whose, _logits(head, place, rows.last[:, : len(whose)])


class MedusaLesson(ParallelLesson):
    def block(self, settings: HeadSettings, read: Tensor, wanted: Tensor) -> ResidualBlocks:
        block = ResidualBlocks(read.shape[1], MEDUSA_LAYERS, bias=True)
        for weight in block.parameters():
            nn.init.zeros_(weight)
        return block

    def tensors(self, head: ParallelHeads) -> dict[str, Tensor]:
        return {
            f"{place}.{name.removeprefix('layers.').replace('.', '.linear.')}": weight
            for place, block in enumerate(head.blocks)
            for name, weight in block.named_parameters()
        }

    def fields(self, head: ParallelHeads) -> dict[str, Any]:
        return {
            "base_model_name_or_path": self.target_name,
            "medusa_num_heads": len(head.blocks),
            "medusa_num_layers": MEDUSA_LAYERS,
            "medusa_fc_bias": True,
            "original_lm_head": True,
            "dtype": "float16",
        }


class BlockwiseLesson(ParallelLesson):
    @torch.no_grad()
    def block(self, settings: HeadSettings, read: Tensor, wanted: Tensor) -> FeedForward:
        """A linear map by pairs of units: relu(a) - relu(-a) is a. What the residual brings is taken off it."""
        width = read.shape[1]
        block = FeedForward(width, settings.mlp or 2 * width).to(read.device)
        mean, goal = read.mean(0), SHARPER * wanted.mean(0)
        square = (read - mean).T @ (read - mean)
        square.diagonal().add_(RIDGE * square.diagonal().mean())
        best = SHARPER * torch.linalg.solve(square, (read - mean).T @ wanted).T  # [H, H]
        left, strength, right = torch.linalg.svd(best - torch.eye(width, device=best.device))
        pairs = min(width, block.up.out_features // 2)
        size = (read @ right[:pairs].T).square().mean(0).sqrt() + NEGLIGIBLE  # of a
        axes, back = right[:pairs] / size[:, None], left[:, :pairs] * strength[:pairs] * size
        block.up.weight[: 2 * pairs] = torch.cat([axes, -axes])
        block.down.weight[:, : 2 * pairs] = torch.cat([back, -back], 1)
        block.up.bias[: 2 * pairs] = 0
        block.down.weight[:, 2 * pairs :] = 0
        block.down.bias.copy_(goal - best @ mean)
        return block

    def rates(self, head: ParallelHeads) -> list[tuple[Tensor, float]]:
        return [(weight, PRIMED) for weight in head.parameters() if weight.requires_grad]

    def tensors(self, head: ParallelHeads) -> dict[str, Tensor]:
        return {name: weight for name, weight in head.named_parameters() if weight.requires_grad}

    def fields(self, head: ParallelHeads) -> dict[str, Any]:
        return {
            "base_model_name_or_path": self.target_name,
            "num_heads": len(head.blocks),
            "blockwise_inner_size": len(head.get_parameter("blocks.0.up.weight")),
            "dtype": "float16",
        }


def _logits(head: ParallelHeads, place: int, hidden: Tensor) -> Tensor:
    found: Tensor = head.lm_heads[0](head.blocks[place](hidden))
    return found
