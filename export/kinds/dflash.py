"""DFlash: layers that read the target's features as context, and a block of masks that all see each other.

A block is the last known token, its anchor, and masks; each of them says the token of its place, or the one after
it. Every layer makes its keys and values of a token's features where the target has read it, and of the block's own
hidden states in the block.

In a call of the graph the slot of token i holds the features of the token before it, so all lie a place later than
in the text. The anchor comes twice: in its slot, with the features of the token before, and as the first of the block.

its authors      the fields of its layers lie in config.json itself, the others in `dflash_config`
speculators      the fields of its layers lie in `transformer_layer_config`
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3 import modeling_qwen3

from ...engines import Engine, ExportError, Masks
from ..checking.check import Errors
from ..tracing.cache import Places, ScatterCache, by_layer
from ..tracing.hidden_states import Features
from ..tracing.modules import only_rows, seen_by
from ..tracing.repeating import depth_of
from .check_blocks import LARGEST, said_in_blocks
from .files import filled
from .heads import Compare, HeadCheckpoint, HeadKind, Wire
from .layers import LAYER_FIELDS, MEANINGLESS, layer_config
from .slots import SlotHead, after_the_first, draft_vocabulary, ends_of, mask_token_of, scale_of

IDS = "aux_hidden_state_layer_ids"
OWN_FIELDS = {
    IDS, "block_size", "dflash_config", "draft_vocab_size", "mask_token_id", "num_target_layers",
    "sample_from_anchor", "sliding_window_non_causal", "speculators_config", "speculators_model_type",
    "speculators_version", "target_hidden_size", "target_layer_ids", "transformer_layer_config",
}  # fmt: skip
DFLASH_FIELDS = {"block_size", "mask_token_id", "target_layer_ids"}
UNREAD = ("t2d", "d2t", "embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight")
APART = 8  # places between anchors that are measured


@dataclass(frozen=True)
class Block:
    size: int  # with its anchor
    mask: int  # the token that stands for the others
    from_anchor: bool  # the anchor says the first token after it, else the first mask does

    @property
    def proposals(self) -> int:
        return self.size if self.from_anchor else self.size - 1


class Context(nn.Module):
    """Makes a token's features of the target's hidden states; it is computed in the target's graph."""

    def __init__(self, config: Any, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, config.hidden_size, bias=False)
        self.hidden_norm = modeling_qwen3.Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden: Sequence[Tensor]) -> Tensor:
        found: Tensor = self.hidden_norm(self.fc(torch.cat(list(hidden), -1)))
        return found


class DFlash(SlotHead):
    def __init__(self, config: Any, inputs: int, target_hidden: int, draft_vocab: int, block: Block) -> None:
        super().__init__(config)
        self.block = block
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            modeling_qwen3.Qwen3DecoderLayer(config, place) for place in range(config.num_hidden_layers)
        )
        self.norm = modeling_qwen3.Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab, bias=False)
        self.rotary_emb = modeling_qwen3.Qwen3RotaryEmbedding(config)
        self.encoder = Context(config, inputs * target_hidden)
        self.knows(config.vocab_size, draft_vocab)

    def states(
        self, input_ids: Tensor, features: Tensor, position_ids: Tensor, in_block: Tensor, mask: Tensor, cache: Any
    ) -> Tensor:
        """Return the last hidden states [B, S, hidden], normed; those of the context mean nothing."""
        hidden = self.embed_tokens(input_ids)
        rotary = self.rotary_emb(hidden, position_ids)
        for layer in list[Any](self.layers):
            asking = layer.input_layernorm(hidden)
            read = torch.where(in_block[..., None], asking, features)
            hidden = hidden + self._attend(layer.self_attn, asking, read, rotary, mask, cache)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        normed: Tensor = self.norm(hidden)
        return normed

    def _attend(self, attention: Any, asking: Tensor, read: Tensor, rotary: Any, mask: Tensor, cache: Any) -> Tensor:
        shape = (*asking.shape[:2], -1, attention.head_dim)
        query = attention.q_norm(attention.q_proj(asking).view(shape)).transpose(1, 2)
        key = attention.k_norm(attention.k_proj(read).view(shape)).transpose(1, 2)
        value = attention.v_proj(read).view(shape).transpose(1, 2)
        query, key = modeling_qwen3.apply_rotary_pos_emb(query, key, *rotary)
        if cache is not None:
            key, value = cache.update(key, value, attention.layer_idx)
        run = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, modeling_qwen3.eager_attention_forward
        )
        found, _ = run(attention, query, key, value, mask, scaling=attention.scaling, dropout=0.0)
        out: Tensor = attention.o_proj(found.reshape(*asking.shape[:2], -1))
        return out

    def said(self, tokens: Tensor, features: Tensor, anchors: Sequence[int]) -> Tensor:
        """Return the logits [N, proposals, V] of blocks after these anchors, places in the tokens [L].

        Each sees the features [L, hidden] of the tokens before its anchor, and each place follows the text.
        """
        places = torch.tensor(list(anchors))[:, None] + torch.arange(self.block.proposals)
        before = tokens[places.clamp(max=len(tokens) - 1).to(tokens.device)]
        return self.following(self.logits(self.blocks(tokens, features, anchors)), before)

    def following(self, logits: Tensor, before: Tensor) -> Tensor:
        """Return the logits [..., V] of places after these tokens [...]: no place knows the token of another."""
        return logits

    def blocks(self, tokens: Tensor, features: Tensor, anchors: Sequence[int]) -> Tensor:
        """Return the normed hidden states [N, proposals, hidden] of the same blocks."""
        size, device = self.block.size, tokens.device
        length, count = len(features), len(anchors)
        ids = torch.full((count, size), self.block.mask, device=device)
        ids[:, 0] = tokens[list(anchors)]
        at = torch.tensor(list(anchors), device=device)
        positions = torch.cat([torch.arange(length, device=device), (at[:, None] + torch.arange(size)).flatten()])
        ids = torch.cat([torch.zeros(length, dtype=ids.dtype, device=device), ids.flatten()])
        in_block = torch.arange(len(ids), device=device) >= length
        of = torch.arange(count, device=device).repeat_interleave(size)
        seen = torch.eye(len(ids), dtype=torch.bool, device=device)
        seen[length:, :length] = torch.arange(length, device=device) < at[of][:, None]
        seen[length:, length:] = of[:, None] == of
        mask = torch.zeros(seen.shape, device=device).masked_fill(~seen, torch.finfo(features.dtype).min)
        read = torch.cat([features, features.new_zeros(count * size, features.shape[1])])
        found = self.states(ids[None], read[None], positions[None], in_block[None], mask[None, None], None)
        return found[0, length:].view(count, size, -1)[:, size - self.block.proposals :]

    def traced(self) -> nn.Module:
        return TracedBlocks(self)

    @property
    def masks(self) -> Masks:
        block = self.block
        return Masks(block.mask, block.size - 1, repeats=True, first=1 if block.from_anchor else 2)

    @property
    def measured_places(self) -> int:
        return self.block.proposals

    def says(self, window: Tensor, features: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        places = self.measured_places
        anchors = torch.arange(1, len(window) - places, APART)
        said = self.said(window, features, anchors.tolist())
        yield from ((anchors + place, said[:, place]) for place in range(places))

    def expected(self, tokens: Tensor, features: Tensor) -> tuple[float, Compare]:
        anchors = range(1, len(tokens))
        groups = [self.blocks(tokens, features, anchors[i : i + APART]) for i in range(0, len(anchors), APART)]
        states = torch.cat(groups)
        expected = self.logits(states)

        def compare(engine: Engine, errors: Errors | None) -> Tensor:
            said, made = said_in_blocks(engine, self.block, tokens, features)
            if errors is not None:
                errors.compare("blocks", said, expected)
                errors.compare("hidden states", made, states, float(states.std()))
            return self.following(said[:, 0], tokens[1:])

        return scale_of(expected), compare


class TracedBlocks(nn.Module):
    """`(input_ids, start, depths, ancestors, logit_rows, past_hidden, past_…) -> (logits, present_hidden, present_…)`.

    The block is its masks and the token before the first of them.
    """

    def __init__(self, head: DFlash) -> None:
        super().__init__()
        self.head = head

    def forward(
        self,
        input_ids: Tensor,
        start: Tensor,
        depths: Tensor,
        ancestors: Tensor,
        logit_rows: Tensor,
        past_hidden: Tensor,  # [B, S, hidden], the features of the token before each
        *past: Tensor,
    ) -> tuple[Tensor, ...]:
        masks = input_ids == self.head.block.mask
        in_block = masks | torch.cat([masks[:, 1:], torch.zeros_like(masks[:, :1])], 1)
        within = in_block[:, :, None] & in_block[:, None, :]
        cache = ScatterCache(Places(start, depths, ancestors | within, depths), by_layer(past))
        mask = seen_by(input_ids.shape[1], past[0].shape[2], cache.places, after_the_first)
        positions = (start[:, None] + depths - 1).clamp(min=0)
        normed = only_rows(logit_rows, self.head.states(input_ids, past_hidden, positions, in_block, mask, cache))
        return (self.head.logits(normed).float(), normed, *cache.kept.values())


class DFlashKind(HeadKind):
    name = "dflash"
    names: ClassVar[tuple[str, ...]] = ("dflash", "DFlashDraftModel", "DFlashSpeculator")
    known: ClassVar[Mapping[str, set[str]]] = {
        "": LAYER_FIELDS | OWN_FIELDS | MEANINGLESS,
        "transformer_layer_config": LAYER_FIELDS | MEANINGLESS,
        "dflash_config": DFLASH_FIELDS,
    }
    from_anchor: ClassVar[bool] = False  # whether the anchor speaks where nothing is said of it

    def recognises(self, fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        named = [fields.get("speculators_model_type"), *(fields.get("architectures") or ())]
        return any(name in self.names for name in named)

    def made(self, name: str, fields: Mapping[str, Any], parts: tuple[Any, ...]) -> DFlash:
        """Make the head of a configuration, still without its weights."""
        return DFlash(*parts)

    def read(self, checkpoint: HeadCheckpoint, target: Any, dtype: str, tokens: int) -> tuple[DFlash, dict[str, Wire]]:
        name, fields = checkpoint.name, {**checkpoint.fields, **(checkpoint.fields.get("dflash_config") or {})}
        layers = {"model_type": "qwen3"} | dict(fields.get("transformer_layer_config") or checkpoint.fields)
        config = layer_config(name, layers, target.config.vocab_size)
        if config.model_type != "qwen3":
            raise ExportError(f"head {name} has layers of the type {config.model_type!r}, expected qwen3")
        block = _block(name, {"sample_from_anchor": self.from_anchor, **fields}, config.vocab_size)
        tensors = checkpoint.tensors()
        ways = _ways(name, fields, depth_of(target))
        places = draft_vocabulary(name, tensors, config.vocab_size)
        draft_vocab = len(tensors["d2t"]) if "d2t" in tensors else config.vocab_size
        with torch.device("meta"):
            head = self.made(name, fields, (config, len(ways[0]), target.config.hidden_size, draft_vocab, block))
        given = ends_of(target) | {
            f"encoder.{key}" if key.startswith(("fc.", "hidden_norm.")) else key: value
            for key, value in tensors.items()
            if key not in UNREAD
        }
        if given["embed_tokens.weight"].shape[1] != config.hidden_size:
            raise ExportError(
                f"head {name} has {config.hidden_size} channels, its target {given['embed_tokens.weight'].shape[1]}; "
                "take the head of this target"
            )
        filled(head, given, name, dtype)
        head.places = places
        head.rotary_emb = type(head.rotary_emb)(config)
        return head, {f"reads hidden states {layers}": partial(Features, head.encoder, layers) for layers in ways}


def _block(name: str, fields: Mapping[str, Any], vocab: int) -> Block:
    size = fields.get("block_size")
    if type(size) is not int or not 2 <= size <= LARGEST:
        raise ExportError(f"head {name} has the block_size {size!r}, expected 2 to {LARGEST}")
    return Block(size, mask_token_of(name, fields, vocab), bool(fields["sample_from_anchor"]))


def _ways(name: str, fields: Mapping[str, Any], layers: int) -> list[tuple[int, ...]]:
    """Return the hidden states that it may read; ids of its authors count layers, others may count either."""
    ids = fields.get("target_layer_ids") or fields.get(IDS)
    if not ids:
        raise ExportError(f"config.json of head {name} names no layers of its target; download it again")
    given = tuple(map(int, ids))
    shifted = tuple(one + 1 for one in given)
    found = [shifted] if fields.get("target_layer_ids") else [given, shifted]
    able = [one for one in found if all(0 <= each < layers for each in one)]
    if not able:
        raise ExportError(
            f"head {name} reads the hidden states {found[0]} of its target, which has {layers} layers; take the head "
            "of this target"
        )
    return able
