"""Reads Medusa and blockwise heads.

Medusa      `{head}.{layer}.linear.…` and `{head}.{layers}.weight`, the projection, as its authors write it; or
            `blocks.{head}.layers.{layer}.…` and `lm_heads.{head}.weight`. Without projections: that of the target.
blockwise   `blocks.{head}.up.…` and `blocks.{head}.down.…`; the projection is the target's
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...engines import CALL, Contract, Engine, ExportError, State, blank_cache, make_step
from ..checking.check import Errors
from ..checking.quality import Sample
from ..tracing.hidden_states import LAST, Features, Last
from .checked import Compare, checked
from .heads import HeadCheckpoint, LoadedHead, filled
from .overlap import overlaps
from .parallel import FeedForward, ParallelHeads, ResidualBlocks

AUTHORS = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(?:linear\.)?(weight|bias)")
KNOWN_FIELDS = {
    "architectures", "auto_map", "base_model_name_or_path", "blockwise_inner_size", "dtype", "hidden_size",
    "medusa_fc_bias", "medusa_hidden_size", "medusa_num_heads", "medusa_num_layers", "model_type", "num_heads",
    "num_hidden_layers", "original_lm_head", "torch_dtype", "transformers_version", "truncated_vocab_size",
    "version", "vocab_size",
}  # fmt: skip


class ParallelKind:
    """The common part of Medusa and blockwise heads."""

    name: str

    def blocks(self, tensors: Mapping[str, Tensor], hidden: int) -> list[Any]:
        """Return the heads that these tensors fill, before their projections."""
        raise NotImplementedError

    def renamed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(tensors)

    def load(self, checkpoint: HeadCheckpoint, target: Any, contract: Contract, sample: Sample) -> LoadedHead:
        name, hidden = checkpoint.name, target.config.hidden_size
        if unknown := sorted(set(checkpoint.fields) - KNOWN_FIELDS):
            raise ExportError(
                f"head {name} has the field {unknown[0]!r} in its config.json, which this version does not know and "
                "which may change what it computes"
            )
        tensors = self.renamed(checkpoint.tensors())
        blocks = self.blocks(tensors, hidden)
        if not blocks:
            raise ExportError(f"head {name} holds no tensors of {self.name} heads; download it again")
        own = any(key.startswith("lm_heads.") for key in tensors)
        projection = target.get_output_embeddings().weight.detach()
        vocab = tensors["lm_heads.0.weight"].shape[0] if own and "lm_heads.0.weight" in tensors else len(projection)
        if vocab < sample.vocab_size:
            raise ExportError(
                f"head {name} is for a target of {vocab:,} tokens, this one has {sample.vocab_size:,}; take the head "
                "of this target"
            )
        heads = ParallelHeads(self.name, blocks, hidden, vocab, own)
        if not own:
            tensors["lm_heads.0.weight"] = projection
        filled(heads, tensors, name, contract.dtype)
        shares = measured(heads, target, sample)
        said = ", then ".join(f"{share:.3f}" for share in shares)
        return LoadedHead(
            heads,
            Features(Last(), (LAST,)),
            layers=len(blocks),
            heads=1,
            hidden=hidden,
            vocab_size=vocab,
            states=(State("hidden", (hidden,), contract.dtype, CALL),),
            notes=[f"{name} has {len(blocks)} {self.name} heads: they overlap with their target by {said}"],
            readings={f"{len(blocks)} heads": shares},
        )

    def check(
        self, graph: Path, contract: Contract, head: Any, tokens: Tensor, features: Tensor, quantised: bool
    ) -> tuple[dict[str, Any], Tensor]:
        """Compare what every head says after each token of a sample."""

        def expect() -> tuple[float, Compare]:
            states, expected = head(features)

            def compare(engine: Engine, errors: Errors | None) -> Tensor:
                heads = engine.contract.layers
                logits = torch.zeros(len(features), heads, engine.contract.vocab_size)
                made = torch.zeros(len(features), heads, features.shape[1])
                inputs = {
                    "input_ids": tokens[:, None].contiguous(),
                    "start": torch.zeros(len(tokens), dtype=torch.int64),
                    "logit_rows": torch.arange(heads).expand(len(tokens), -1).contiguous(),
                    "past_hidden": features[:, None].contiguous(),
                }
                cache = blank_cache(engine.contract, len(tokens), 1)
                make_step(engine, cache, inputs, {"logits": logits, "present_hidden": made}).run()
                if errors is not None:
                    for place in range(heads):
                        errors.compare(f"head {place + 1}", logits[:, place], expected[:, place])
                    errors.compare("hidden states", made, states, float(states.std()))
                return logits[:-1, 0]

            return float(expected.std()), compare

        return checked(graph, contract, head, quantised, expect)


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

    def blocks(self, tensors: Mapping[str, Tensor], hidden: int) -> list[Any]:
        layers = _count(tensors, r"blocks\.0\.layers\.(\d+)\.weight")
        bias = "blocks.0.layers.0.bias" in tensors
        heads = max(_count(tensors, r"blocks\.(\d+)\..*"), _count(tensors, r"lm_heads\.(\d+)\.weight"))
        return [ResidualBlocks(hidden, layers, bias) for _ in range(heads)]


class BlockwiseKind(ParallelKind):
    name = "blockwise"

    def recognises(self, fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        return "blockwise_inner_size" in fields or "blocks.0.up.weight" in shapes

    def blocks(self, tensors: Mapping[str, Tensor], hidden: int) -> list[Any]:
        if "blocks.0.up.weight" not in tensors:
            return []
        inner = tensors["blocks.0.up.weight"].shape[0]
        return [FeedForward(hidden, inner) for _ in range(_count(tensors, r"blocks\.(\d+)\..*"))]


def _count(tensors: Mapping[str, Tensor], pattern: str) -> int:
    found = (re.fullmatch(pattern, key) for key in tensors)
    return max((int(at[1]) + 1 for at in found if at is not None), default=0)


def measured(heads: ParallelHeads, target: Any, sample: Sample) -> list[float]:
    """Return the overlap of each head's law with its target's."""
    count = len(heads.blocks)

    def says(window: Tensor, states: dict[int, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        after = torch.arange(1, 1 + len(window) - count)
        said = heads(states[LAST][0])[1]
        yield from ((after + place, said[: len(after), place]) for place in range(count))

    return overlaps(heads, count, says, target, sample)
