"""PaSS: look-ahead embeddings, which a target reads after a token as if they were the next ones.

They are no model of their own but further rows of the target's embedding, which the graph reads by the ids after its
vocabulary; where that was tied to the projection it is no longer. What it makes of the first says what follows
the next token, and so on.

`look_aheads.weight` [T, H]; nobody publishes such weights, so this format is ours. With `lora.{layer}.down` [R, in] and
`lora.{layer}.up` [out, R] a LoRA is added to these linear layers where look-aheads are read, and nowhere else: a graph
of its own, in which every call computes what it may add.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...engines import MAX_DRAFT_LENGTH, Contract, ExportError
from ..checking.oracle import branch_logits
from ..checking.quality import Sample
from ..checkpoints.checkpoint import find_config
from ..checkpoints.weight_files import require_weights
from .files import HeadFiles, refuse_unknown, shapes_of

PASS = "pass"  # how `model_type` and their drafter call them
WEIGHT = "look_aheads.weight"
LORA, PARTS = "lora.", ("down", "up")  # lora.{layer}.down [R, in] and lora.{layer}.up [out, R]
KNOWN_FIELDS = {"base_model_name_or_path", "dtype", "model_type", "num_look_aheads", "torch_dtype"}
WINDOW, SLOTS = 128, 2  # tokens of the sample after which they are measured, one in so many


@dataclass(frozen=True)
class LookAheads(HeadFiles):
    """Look-ahead embeddings that can be exported with their target, still unread."""

    def join(self, target: Any, vocab_size: int) -> int:
        """Let a loaded target read them by the ids after its vocabulary; return how many there are."""
        name, read = self.name, target.get_input_embeddings()
        refuse_unknown(name, self.fields, KNOWN_FIELDS)
        tensors = self.tensors()
        lora = {key for key in tensors if key.startswith(LORA) and key.endswith(PARTS)}
        if set(tensors) - lora != {WEIGHT}:
            found = sorted(set(tensors) - lora)
            raise ExportError(f"head {name} holds the tensors {found}, expected {WEIGHT} alone, or a LoRA beside it")
        weight = tensors[WEIGHT]
        count, width = len(weight), read.weight.shape[1]
        if weight.shape[1:] != (width,):
            raise ExportError(
                f"tensor {WEIGHT} of head {name} is {list(weight.shape)}, and its target reads embeddings of {width} "
                "numbers; take the head of this target"
            )
        if not 1 <= count <= MAX_DRAFT_LENGTH or self.fields.get("num_look_aheads", count) != count:
            raise ExportError(
                f"head {name} holds {count} look-aheads and its config.json says "
                f"{self.fields.get('num_look_aheads', count)}, expected the same number from 1 to {MAX_DRAFT_LENGTH}"
            )
        for key, each in tensors.items():
            if not each.isfinite().all():
                raise ExportError(f"tensor {key} of head {name} holds numbers that are not finite; take a sound one")
        if len(read.weight) != vocab_size or getattr(target.config, "hidden_size_per_layer_input", None):
            raise ExportError(
                f"{name} is a head of look-aheads, and its target reads tokens otherwise than by one table with a row "
                "for each that it says; leave it out"
            )
        read.weight = nn.Parameter(torch.cat([read.weight.detach(), weight.to(read.weight)]), requires_grad=False)
        read.num_embeddings += count
        if lora:
            self._add(target, {key: tensors[key].to(read.weight.dtype) for key in lora}, vocab_size)
        return count

    def _add(self, target: Any, tensors: Mapping[str, Tensor], vocab_size: int) -> None:
        """Add a LoRA to some layers of a target where it reads look-aheads."""
        layers, gate = dict(target.named_modules()), Gate(target.get_input_embeddings(), vocab_size)
        for name in sorted({key.removeprefix(LORA).rpartition(".")[0] for key in tensors}):
            layer = layers.get(name)
            down, up = (tensors.get(f"{LORA}{name}.{part}") for part in PARTS)
            if not isinstance(layer, nn.Linear) or layer is target.get_output_embeddings():
                raise ExportError(
                    f"head {self.name} adds to {name}, which is no linear layer of its target before the logits; take "
                    "another"
                )
            if down is None or up is None:
                raise ExportError(f"head {self.name} holds one half of a LoRA of {name}, expected down and up")
            if (down.shape[1:], up.shape) != ((layer.in_features,), (layer.out_features, len(down))):
                raise ExportError(
                    f"head {self.name} adds {list(down.shape)} and {list(up.shape)} to {name}, whose matrix is "
                    f"{list(layer.weight.shape)}; take the head of this target"
                )
            gate.add(layer, down, up)

    def measured(self, target: Any, contract: Contract, sample: Sample, count: int) -> str:
        """Say how far each look-ahead overlaps with its target's at temperature 1, on a part of a text."""
        text = sample.tokens[: min(WINDOW, contract.max_length)]
        ids = list(range(contract.vocab_size, contract.vocab_size + count))
        ends = range(1, len(text) - count, SLOTS)
        if not ends:
            return f"{self.name} has {count} look-aheads"

        def distributions(tokens: list[int]) -> Tensor:
            return branch_logits(target, [tokens])[0][:, : sample.vocab_size].softmax(-1)

        shares, whole = torch.zeros(count), distributions(text)
        for end in ends:  # one at a time: a large vocabulary takes much memory
            shares += torch.minimum(whole[end : end + count], distributions(text[:end] + ids)[-count:]).sum(-1)
        words = ", then ".join(f"{share / len(ends):.3f}" for share in shares.tolist())
        return f"{self.name} has {count} look-aheads: they overlap with their target by {words}"


class Gate:
    """Lets through what is read by the ids after a vocabulary."""

    def __init__(self, read: nn.Module, vocab_size: int) -> None:
        self._open = torch.zeros(0)  # [B, S, 1] bool, of the call that runs
        self._vocab_size = vocab_size
        read.register_forward_pre_hook(self._note)

    def opens_to(self, ids: Tensor) -> Tensor:
        return ids >= self._vocab_size

    def _note(self, _: nn.Module, inputs: tuple[Tensor]) -> None:
        self._open = self.opens_to(inputs[0])[..., None]

    def add(self, layer: nn.Linear, down: Tensor, up: Tensor) -> None:
        """Add a LoRA to what a layer gives: nothing at all where the gate is closed."""
        layer.ahead_down, layer.ahead_up = (nn.Parameter(one, requires_grad=False) for one in (down, up))
        layer.register_forward_hook(self._added)

    def _added(self, layer: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        inner = nn.functional.linear(inputs[0], layer.ahead_down)
        more: Tensor = nn.functional.linear(torch.where(self._open, inner, torch.zeros_like(inner)), layer.ahead_up)
        return output + more


def open_look_aheads(name: str | Path) -> LookAheads | None:
    """Read all of them but the weights; None for anything else."""
    found = find_config(str(name))
    if found is None or not _recognised(found[1], shapes_of(str(name), found[0])):
        return None
    path, fields = found
    require_weights(str(name), path)
    return LookAheads(str(name), path, fields)


def _recognised(fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    return fields.get("model_type") == PASS or WEIGHT in shapes
