"""Reads DFlash heads as people publish them.

its authors      the fields of its layers lie in config.json itself, the others in `dflash_config`
speculators      the fields of its layers lie in `transformer_layer_config`
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...engines import Contract, Engine, ExportError, Masks, blank_cache, make_step
from ..checking.check import Errors
from ..checking.quality import Sample
from ..tracing.hidden_states import Features
from ..tracing.repeating import depth_of
from .checked import Compare, checked, scale_of
from .dflash import Block, DFlash
from .heads import HeadCheckpoint, LoadedHead, filled
from .layers import LAYER_FIELDS, MEANINGLESS, layer_config, refuse_unknown
from .overlap import overlaps
from .slots import draft_vocabulary, loaded

IDS = "aux_hidden_state_layer_ids"
OWN_FIELDS = {
    IDS, "block_size", "dflash_config", "draft_vocab_size", "mask_token_id", "num_target_layers",
    "sample_from_anchor", "sliding_window_non_causal", "speculators_config", "speculators_model_type",
    "speculators_version", "target_hidden_size", "target_layer_ids", "transformer_layer_config",
}  # fmt: skip
DFLASH_FIELDS = {"block_size", "mask_token_id", "target_layer_ids"}
UNREAD = ("t2d", "d2t", "embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight")
LARGEST = 32  # tokens of a block
APART = 8  # places between anchors that are measured
AGAIN = 4  # tokens that the check reads again before a block
GARBAGE = 1e3  # what no slot may read


class DFlashKind:
    name = "dflash"
    names: ClassVar[tuple[str, ...]] = ("dflash", "DFlashDraftModel", "DFlashSpeculator")
    own_fields: ClassVar[set[str]] = OWN_FIELDS
    from_anchor: ClassVar[bool] = False  # whether the anchor speaks where nothing is said of it

    def recognises(self, fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        named = [fields.get("speculators_model_type"), *(fields.get("architectures") or ())]
        return any(name in self.names for name in named)

    def made(self, name: str, fields: Mapping[str, Any], parts: tuple[Any, ...]) -> DFlash:
        """Make the head of a configuration, still without its weights."""
        return DFlash(*parts)

    def load(self, checkpoint: HeadCheckpoint, target: Any, contract: Contract, sample: Sample) -> LoadedHead:
        name, fields = checkpoint.name, checkpoint.fields
        inner, own = fields.get("transformer_layer_config") or {}, fields.get("dflash_config") or {}
        known = (fields, LAYER_FIELDS | self.own_fields | MEANINGLESS), (inner, LAYER_FIELDS | MEANINGLESS)
        refuse_unknown(name, *known, (own, DFLASH_FIELDS))
        config = layer_config(name, {"model_type": "qwen3"} | dict(inner or fields), target.config.vocab_size)
        if config.model_type != "qwen3":
            raise ExportError(f"head {name} has layers of the type {config.model_type!r}, expected qwen3")
        block = _block(name, {"sample_from_anchor": self.from_anchor, **fields, **own}, config.vocab_size)
        tensors = checkpoint.tensors()
        ways = _ways(name, {**fields, **own}, depth_of(target))
        places = draft_vocabulary(name, tensors, config.vocab_size)
        draft_vocab = len(tensors["d2t"]) if "d2t" in tensors else config.vocab_size
        with torch.device("meta"):
            head = self.made(name, fields, (config, len(ways[0]), target.config.hidden_size, draft_vocab, block))
        given = {
            f"encoder.{key}" if key.startswith(("fc.", "hidden_norm.")) else key: value
            for key, value in tensors.items()
            if key not in UNREAD
        }
        given["embed_tokens.weight"] = target.get_input_embeddings().weight.detach()
        given.setdefault("lm_head.weight", target.get_output_embeddings().weight.detach())
        if given["embed_tokens.weight"].shape[1] != config.hidden_size:
            raise ExportError(
                f"head {name} has {config.hidden_size} channels, its target {given['embed_tokens.weight'].shape[1]}; "
                "take the head of this target"
            )
        filled(head, given, name, contract.dtype)
        head.places = places
        head.rotary_emb = type(head.rotary_emb)(config)
        readings = {
            f"reads hidden states {layers}": measured(head, Features(head.encoder, layers), target, sample)
            for layers in ways
        }
        chosen = max(readings, key=lambda way: sum(readings[way]))
        features = Features(head.encoder, ways[list(readings).index(chosen)])
        masks = Masks(block.mask, block.size - 1, repeats=True, first=1 if block.from_anchor else 2)
        return loaded(name, head, features, contract, readings, chosen, masks)

    def check(
        self, graph: Path, contract: Contract, head: Any, tokens: Tensor, features: Tensor, quantised: bool
    ) -> tuple[dict[str, Any], Tensor]:
        def expect() -> tuple[float, Compare]:
            anchors = range(1, len(tokens))
            states = torch.cat(
                [head.blocks(tokens, features, anchors[i : i + APART]) for i in range(0, len(anchors), APART)]
            )
            expected = head.logits(states)

            def compare(engine: Engine, errors: Errors | None) -> Tensor:
                said, made = _blocks(engine, head.block, tokens, features)
                if errors is not None:
                    errors.compare("blocks", said, expected)
                    errors.compare("hidden states", made, states, float(states.std()))
                following: Tensor = head.following(said[:, 0], tokens[1:])
                return following

            return scale_of(expected), compare

        return checked(graph, contract, head, quantised, expect)


def _blocks(engine: Any, block: Block, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the graph says behind each token but the first, as rounds read them, and its hidden states.

    They are [L - 1, proposals, V] and [L - 1, proposals, hidden].

    Each call reads some tokens again, which the block before has overwritten, and behind a block there may be tokens
    that belong to nothing.
    """
    contract, length = engine.contract, len(tokens)
    cache = blank_cache(contract, 1, length + 2 * LARGEST + AGAIN)
    for name in contract.cache_names:
        cache[name].fill_(GARBAGE)
    found, states = [], []
    for anchor in range(1, length):
        begin = max(0, anchor + 1 - AGAIN)
        read = tokens[begin : anchor + 1]
        masks = torch.full((block.size - 1,), block.mask)
        slack = torch.zeros(anchor % 3, dtype=torch.int64)
        ids = torch.cat([read, tokens[anchor : anchor + 1], masks, slack])[None]
        given = torch.full((1, ids.shape[1], features.shape[1]), GARBAGE)
        first = int(begin == 0)
        given[0, first : len(read)] = features[begin + first - 1 : anchor]
        rows = torch.arange(len(read), ids.shape[1] - len(slack))[None, block.size - block.proposals :]
        logits = torch.zeros(1, block.proposals, contract.vocab_size)
        made = torch.zeros(1, block.proposals, features.shape[1])
        inputs = {
            "input_ids": ids, "start": torch.tensor([begin]), "past_hidden": given, "logit_rows": rows.contiguous(),
        }  # fmt: skip
        make_step(engine, cache, inputs, {"logits": logits, "present_hidden": made}).run()
        found.append(logits)
        states.append(made)
    return torch.cat(found), torch.cat(states)


def _block(name: str, fields: Mapping[str, Any], vocab: int) -> Block:
    size, mask = fields.get("block_size"), fields.get("mask_token_id")
    if type(size) is not int or not 2 <= size <= LARGEST:
        raise ExportError(f"head {name} has the block_size {size!r}, expected 2 to {LARGEST}")
    if type(mask) is not int or not 0 <= mask < vocab:
        raise ExportError(
            f"config.json of head {name} has the mask_token_id {mask!r}, expected one of its {vocab:,} tokens; "
            "download it again"
        )
    return Block(size, mask, bool(fields["sample_from_anchor"]))


def _ways(name: str, fields: Mapping[str, Any], layers: int) -> list[tuple[int, ...]]:
    """Return the hidden states that it may read; ids of its authors count layers, others may count either."""
    ids = fields.get("target_layer_ids") or fields.get(IDS)
    if not ids:
        raise ExportError(f"config.json of head {name} names no layers of its target; download it again")
    given = tuple(map(int, ids))
    behind = tuple(one + 1 for one in given)
    found = [behind] if fields.get("target_layer_ids") else [given, behind]
    able = [one for one in found if all(0 <= each < layers for each in one)]
    if not able:
        raise ExportError(
            f"head {name} reads the hidden states {found[0]} of its target, which has {layers} layers; take the head "
            "of this target"
        )
    return able


def measured(head: DFlash, features: Features, target: Any, sample: Sample) -> list[float]:
    """Return the overlap of a head's laws with its target's, by place."""
    places = head.block.proposals

    def says(window: Tensor, states: dict[int, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        anchors = torch.arange(1, len(window) - places, APART)
        said = head.said(window, features(states)[0], anchors.tolist())
        yield from ((anchors + place, said[:, place]) for place in range(places))

    return overlaps(head, places, says, target, sample)
