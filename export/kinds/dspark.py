"""DSpark: a block of DFlash whose tokens follow one another, and which says how sure it is of each.

Its Markov head adds to the logits of a place what the token before it is worth. Its confidence is the chance that a
place's token is accepted if those before it are. It reads the hidden state of the place and the token before, so it is
known before the place's own token is drawn.

its authors      all fields lie in config.json itself; the head has copies of the target's embedding and projection
speculators      the fields of its layers lie in `transformer_layer_config`
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...engines import ExportError
from .dflash import DFlash, DFlashKind

OWN_FIELDS = {
    "confidence_head_with_markov", "enable_confidence_head", "markov_head_type", "markov_rank", "num_anchors",
}  # fmt: skip


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
        """Return the logits [..., V] of places after these tokens [...]."""
        added = self.markov_head.markov_w2(self.markov_head.markov_w1(before))
        if added.shape[-1] != logits.shape[-1]:
            added = torch.cat([added, torch.zeros_like(added[..., :1])], -1).index_select(-1, self.places)
        found: Tensor = logits + added
        return found

    def confidence(self, states: Tensor, before: Tensor) -> Tensor:
        """Return how likely tokens are to be accepted [...] after these [...], by the hidden states of their places."""
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


class DSparkKind(DFlashKind):
    name = "dspark"
    known: ClassVar[Mapping[str, set[str]]] = {**DFlashKind.known, "": DFlashKind.known[""] | OWN_FIELDS}
    from_anchor: ClassVar[bool] = True

    def recognises(self, fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        named = str([fields.get("speculators_model_type"), fields.get("architectures")]).lower()
        return "dspark" in named  # its authors name the family of its layers, too

    def made(self, name: str, fields: Mapping[str, Any], parts: tuple[Any, ...]) -> DFlash:
        kind, rank = fields.get("markov_head_type", "vanilla"), fields.get("markov_rank", 256)
        if kind != "vanilla":
            raise ExportError(
                f"head {name} has the markov_head_type {kind!r}, expected 'vanilla', which reads the token before and "
                "nothing else; this version cannot run others"
            )
        if type(rank) is not int or rank < 1:
            raise ExportError(
                f"head {name} has the markov_rank {rank!r}, expected 1 or more; without a Markov head it is a DFlash "
                "head, name it so in its config.json"
            )
        reads = parts[0].hidden_size + rank * bool(fields.get("confidence_head_with_markov", True))
        return DSpark(*parts, rank=rank, confidence=reads * bool(fields.get("enable_confidence_head", True)))
