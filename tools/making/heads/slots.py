"""Teach heads that read a token beside a hidden state, then their own states in its place.

For two fifths of the time they learn their first step alone. Then they learn four, the later ones on a third of the
slots, and from divergence the loss goes over to what is wanted: that proposals are accepted.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from ....export.kinds.slots import SlotHead
from ...training_settings import HeadSettings
from ..learning import NEGLIGIBLE
from .lesson import LATER, Lesson, missed, over
from .spoken import Rows

STEPS = 4  # that it learns to go
SLOTS = 3  # one in so many takes the later steps
MEASURED = 32  # rows by which its beginning is scaled
RIDGE = 0.01  # by which its first linear map is held back, beside inputs of size 1
FAINT = 0.1  # of what begins at random
USUAL = 64  # numbers of a head of attention
EPSILON, THETA = 1e-6, 10000.0  # where the target names none
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")

Slots = TypeVar("Slots", bound=SlotHead)


class SlotLesson(Lesson[Slots]):
    @abstractmethod
    def features(self, head: Slots, rows: Rows) -> Tensor:
        """Return what is read in the slot of each token but the first [B, T - 1, H]."""

    def known(self, head: Slots) -> Tensor | None:
        """The tokens that it may propose; None: all."""
        return None

    def layer(self, settings: HeadSettings) -> dict[str, Any]:
        """The fields of a layer as large as the target's."""
        shape, (vocab_size, width) = self.teacher.checkpoint.shape, self.teacher.projection.shape
        heads = shape.heads or max(1, width // USUAL)  # the target may not attend
        return {
            "vocab_size": vocab_size,
            "hidden_size": width,
            "intermediate_size": settings.mlp or 2 * width,
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": shape.kv_heads or heads,
            "head_dim": shape.head_dim or width // heads,
            "max_position_embeddings": shape.positions,
            "rms_norm_eps": getattr(self.teacher.config, "rms_norm_eps", EPSILON),
            "rope_parameters": {"rope_type": "default", "rope_theta": theta(self.teacher.config)},
            "tie_word_embeddings": False,
            **{name: getattr(self.teacher.config, name, None) for name in SPECIAL},
        }

    def loss(self, head: Slots, rows: Rows, done: float, draw: Any) -> Tensor:
        distributions, known = self.teacher.logits(rows.last).softmax(-1), self.known(head)
        distributions = distributions if known is None else distributions[..., known]
        gone = over(done)
        width = rows.tokens.shape[1]
        last = width - STEPS
        steps = STEPS if gone and last > 0 else 1
        begins = torch.randint(min(SLOTS, max(1, last)), (1,), generator=draw)
        later = torch.arange(int(begins), max(1, last), SLOTS, device=rows.tokens.device)
        slots = torch.arange(width - 1, device=rows.tokens.device)
        total, weights = torch.zeros((), device=rows.tokens.device), 0.0
        for step, normed in enumerate(head.unrolled(rows.tokens[:, 1:], self.features(head, rows), steps, later=later)):
            p, log_q = (
                distributions[:, (slots if step == 0 else later) + step + 1],
                head.lm_head(normed).log_softmax(-1),
            )
            total = total + LATER**step * missed(p, log_q, gone).mean()
            weights += LATER**step
        return total / weights

    def distributions(self, head: Slots, rows: Rows, places: int) -> Iterator[tuple[Tensor, Tensor]]:
        slots = torch.arange(rows.tokens.shape[1] - 1, device=rows.tokens.device)
        for step, normed in enumerate(head.unrolled(rows.tokens[:, 1:], self.features(head, rows), places)):
            valid = slots[: len(slots) - step]
            yield valid + step + 1, head.logits(normed[:, valid])

    def speculators(self, algorithm: str) -> dict[str, Any]:
        """The fields that every head of `speculators` has."""
        architectures = list(self.teacher.config.architectures or [])
        method = {"proposal_type": "greedy", "speculative_tokens": STEPS, "verifier_accept_k": 1}
        return {
            "speculators_model_type": algorithm,
            "speculators_version": "0.9.0",
            "speculators_config": {
                "algorithm": algorithm,
                "proposal_methods": [method | {"accept_tolerance": 0.0}],
                "default_proposal_method": "greedy",
                "verifier": {"name_or_path": self.target_name, "architectures": architectures},
            },
        }


def rms(values: Tensor) -> Tensor:
    """Return the size of each column of values [N, C], or of all values [N]."""
    return values.square().mean(0).sqrt() + NEGLIGIBLE


def theta(config: Any) -> float:
    found = (getattr(config, "rope_parameters", None) or {}).get("rope_theta")
    return float(found) if isinstance(found, int | float) else THETA
