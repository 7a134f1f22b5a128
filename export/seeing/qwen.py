"""The vision towers of Qwen2.5-VL and Qwen3-VL, whose patches stand in squares as they will be merged."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

from ..tracing.modules import attention
from .tower import Tower, joined


class _Patches(Tower):
    def places(self, patches: int, grid: Tensor) -> tuple[Tensor, Tensor]:
        """Return row and column of each patch [patches, 2], and a number of its window."""
        eyes = self.whole.model.visual
        merged, patch = eyes.spatial_merge_size, torch.arange(patches)
        across = grid[2] // merged
        square, within = patch // merged**2, patch % merged**2
        row, column = square // across, square % across
        side = getattr(eyes, "window_size", eyes.patch_size * merged) // merged // eyes.patch_size
        windows = row // side * across + column // side
        return torch.stack([row * merged + within // merged, column * merged + within % merged], 1), windows

    def embedded(self, pixels: Tensor) -> Tensor:
        product = self.whole.model.visual.patch_embed.proj
        return nn.functional.linear(pixels.to(self.dtype), product.weight.flatten(1), product.bias)


class Qwen25(_Patches):
    """Layers attend within windows, but for some."""

    def seen(self, *given: Tensor) -> Tensor:
        pixels, grid = given
        eyes = self.whole.model.visual
        places, windows = self.places(pixels.shape[0], grid)
        hidden = self.embedded(pixels)
        cos, sin = eyes.rotary_pos_emb(hidden, places)
        within = (windows[:, None] == windows)[None, None]
        for layer, block in enumerate(eyes.blocks):
            mask = None if layer in eyes.fullatt_block_indexes else within
            hidden = attended(block, hidden, cos, sin, mask)
        merger = eyes.merger
        found: Tensor = merger.mlp(joined(merger.ln_q(hidden), merger.hidden_size))
        return found


class Qwen3(_Patches):
    """An entry holds what each of the first layers of the text adds to its token, too (DeepStack)."""

    def seen(self, *given: Tensor) -> Tensor:
        pixels, grid = given
        eyes = self.whole.model.visual
        places, _ = self.places(pixels.shape[0], grid)
        hidden = self.embedded(pixels)
        hidden = hidden + self.learned(places, grid).to(hidden.dtype)
        cos, sin = eyes.rotary_pos_emb(hidden, places)
        added = []
        for layer, block in enumerate(eyes.blocks):
            hidden = attended(block, hidden, cos, sin, None)
            if layer in eyes.deepstack_visual_indexes:
                merger = eyes.deepstack_merger_list[eyes.deepstack_visual_indexes.index(layer)]
                added.append(self.merged(merger, merger.norm(joined(hidden, merger.hidden_size))))
        own = self.merged(eyes.merger, joined(eyes.merger.norm(hidden), eyes.merger.hidden_size))
        return torch.cat([own, *added], -1)

    def merged(self, merger: Any, squares: Tensor) -> Tensor:
        found: Tensor = merger.linear_fc2(merger.act_fn(merger.linear_fc1(squares)))
        return found

    def learned(self, places: Tensor, grid: Tensor) -> Tensor:
        """Return what is learned of each place [patches, hidden], between the four that are known next to it."""
        eyes = self.whole.model.visual
        side = eyes.num_grid_per_side
        exact = places.float() * (side - 1) / (grid[1:] - 1).clamp(min=1).float()  # [patches, 2]
        low = exact.floor()
        share, first = exact - low, low.long()
        second = (first + 1).clamp(max=side - 1)
        found = 0
        for row, of_row in ((first[:, 0], 1 - share[:, 0]), (second[:, 0], share[:, 0])):
            for column, of_column in ((first[:, 1], 1 - share[:, 1]), (second[:, 1], share[:, 1])):
                found = found + eyes.pos_embed(row * side + column) * (of_row * of_column)[:, None]
        assert isinstance(found, Tensor)
        return found


def attended(block: Any, hidden: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
    """Let a layer attend, and what follows; with a mask [1, 1, patches, patches] to some patches alone."""
    own = block.attn
    query, key, value = own.qkv(block.norm1(hidden)).unflatten(1, (3, own.num_heads, -1)).unbind(1)
    query, key = apply_rotary_pos_emb_vision(query, key, cos, sin)
    query, key, value = (one.transpose(0, 1)[None] for one in (query, key, value))  # [1, heads, patches, size]
    found, _ = attention(own, query, key, value, mask, scaling=own.scaling)
    hidden = hidden + own.proj(found[0].flatten(1))
    made: Tensor = hidden + block.mlp(block.norm2(hidden))
    return made
