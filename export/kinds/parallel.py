"""Heads that each read the target's last hidden state and say the token of one place: one pass for all proposals.

Head i says the token i + 2 places after the one whose hidden state it reads: the next place is the target's own.
So none of them knows what the others have said.

Medusa      `{head}.{layer}.linear.…` and `{head}.{layers}.weight`, the projection, as its authors write it; or
            `blocks.{head}.layers.{layer}.…` and `lm_heads.{head}.weight`. Without projections: that of the target.
blockwise   `blocks.{head}.up.…` and `blocks.{head}.down.…`; the projection is the target's
"""

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ...engines import CALL, Contract, Engine, ExportError, State
from ..checking.check import Errors
from ..tracing.hidden_states import LAST, Features, Last
from ..tracing.modules import only_rows
from .files import filled
from .heads import Compare, Head, HeadCheckpoint, HeadKind, Wire, in_words
from .written import Cached

AUTHORS = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(?:linear\.)?(weight|bias)")
KNOWN_FIELDS = {
    "architectures", "auto_map", "base_model_name_or_path", "blockwise_inner_size", "dtype", "hidden_size",
    "medusa_fc_bias", "medusa_hidden_size", "medusa_num_heads", "medusa_num_layers", "model_type", "num_heads",
    "num_hidden_layers", "original_lm_head", "torch_dtype", "transformers_version", "truncated_vocab_size",
    "version", "vocab_size",
}  # fmt: skip


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


class ParallelHeads(Head):
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
        states = torch.stack([block(hidden) for block in list[Any](self.blocks)], 1)
        if len(self.lm_heads) == 1:
            return states, self.lm_heads[0](states)
        each = [project(states[:, place]) for place, project in enumerate(self.lm_heads)]
        return states, torch.stack(each, 1)

    @property
    def measured_places(self) -> int:
        return len(self.blocks)

    def contract(self, name: str, target: Contract) -> Contract:
        projection: Any = self.lm_heads[0]
        vocab, hidden = projection.weight.shape
        states = (State("hidden", (hidden,), target.dtype, CALL),)
        return Contract(len(self.blocks), 1, states, vocab, target.max_length, target.dtype)

    def traced(self) -> nn.Module:
        return TracedParallel(self)

    def says(self, window: Tensor, features: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        count = len(self.blocks)
        after = torch.arange(1, 1 + len(window) - count)
        said = self(features)[1]
        yield from ((after + place, said[: len(after), place]) for place in range(count))

    def expected(self, tokens: Tensor, features: Tensor) -> tuple[float, Compare]:
        states, expected = self(features)

        def compare(engine: Engine, errors: Errors | None) -> Tensor:
            rows = torch.arange(len(self.blocks)).expand(len(tokens), -1)
            cached = Cached.of(engine, len(tokens), 1)
            logits, made = cached.call(tokens[:, None], [0] * len(tokens), features[:, None], rows)
            if errors is not None:
                for place in range(len(self.blocks)):
                    errors.compare(f"head {place + 1}", logits[:, place], expected[:, place])
                errors.compare("hidden states", made, states, float(states.std()))
            return logits[:-1, 0]

        return float(expected.std()), compare


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


class ParallelKind(HeadKind):
    """The common part of Medusa and blockwise heads."""

    known: ClassVar[Mapping[str, set[str]]] = {"": KNOWN_FIELDS}

    @abstractmethod
    def blocks(self, tensors: Mapping[str, Tensor], hidden: int) -> list[nn.Module]:
        """Return the heads that these tensors fill, before their projections."""

    def renamed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(tensors)

    def read(
        self, checkpoint: HeadCheckpoint, target: Any, dtype: str, tokens: int
    ) -> tuple[ParallelHeads, dict[str, Wire]]:
        name, hidden = checkpoint.name, target.config.hidden_size
        tensors = self.renamed(checkpoint.tensors())
        blocks = self.blocks(tensors, hidden)
        if not blocks:
            raise ExportError(f"head {name} holds no tensors of {self.name} heads; download it again")
        own = any(key.startswith("lm_heads.") for key in tensors)
        projection = target.get_output_embeddings().weight.detach()
        vocab = tensors["lm_heads.0.weight"].shape[0] if own and "lm_heads.0.weight" in tensors else len(projection)
        if vocab < tokens:
            raise ExportError(
                f"head {name} is for a target of {vocab:,} tokens, this one has {tokens:,}; take the head of this "
                "target"
            )
        heads = ParallelHeads(self.name, blocks, hidden, vocab, own)
        if not own:
            tensors["lm_heads.0.weight"] = projection
        filled(heads, tensors, name, dtype)
        return heads, {f"{len(blocks)} heads": partial(Features, Last(), (LAST,))}

    def notes(self, name: str, readings: Mapping[str, list[float]], chosen: str) -> list[str]:
        shares = readings[chosen]
        return [f"{name} has {len(shares)} {self.name} heads: they overlap with their target by {in_words(shares)}"]


class MedusaKind(ParallelKind):
    name = "medusa"

    def recognises(self, fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        named = "medusa_num_heads" in fields or "medusa" in str(fields.get("architectures")).lower()
        return named or "blocks.0.layers.0.weight" in shapes

    def renamed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found, layers = {}, 0
        for key in tensors:
            if (at := AUTHORS.fullmatch(key)) is not None and ".linear." in key:
                layers = max(layers, int(at[2]) + 1)
        for key, value in tensors.items():
            at = AUTHORS.fullmatch(key)
            if at is None:
                found[key] = value
            elif int(at[2]) < layers:
                found[f"blocks.{at[1]}.layers.{at[2]}.{at[3]}"] = value
            else:
                found[f"lm_heads.{at[1]}.{at[3]}"] = value
        return found

    def blocks(self, tensors: Mapping[str, Tensor], hidden: int) -> list[nn.Module]:
        layers = _count(tensors, r"blocks\.0\.layers\.(\d+)\.weight")
        bias = "blocks.0.layers.0.bias" in tensors
        heads = max(_count(tensors, r"blocks\.(\d+)\..*"), _count(tensors, r"lm_heads\.(\d+)\.weight"))
        return [ResidualBlocks(hidden, layers, bias) for _ in range(heads)]


class BlockwiseKind(ParallelKind):
    name = "blockwise"

    def recognises(self, fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        return "blockwise_inner_size" in fields or "blocks.0.up.weight" in shapes

    def blocks(self, tensors: Mapping[str, Tensor], hidden: int) -> list[nn.Module]:
        if "blocks.0.up.weight" not in tensors:
            return []
        inner = tensors["blocks.0.up.weight"].shape[0]
        return [FeedForward(hidden, inner) for _ in range(_count(tensors, r"blocks\.(\d+)\..*"))]


def _count(tensors: Mapping[str, Tensor], pattern: str) -> int:
    found = (re.fullmatch(pattern, key) for key in tensors)
    return max((int(at[1]) + 1 for at in found if at is not None), default=0)
