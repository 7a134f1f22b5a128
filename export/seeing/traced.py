"""Trace a text model so that a token may be an entry of an image."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...engines import AXES, IMAGES, WHOLE_IMAGES, Contract
from ..tracing.cache import BothWays, Places, ScatterCache
from ..tracing.modules import TracedHead, TracedModel
from ..tracing.repeating import depth_of, layers_of
from ..tracing.swapping import swapped


class TracedSeeing(TracedModel):
    """`(input_ids, start, depths, ancestors, logit_rows, past_…) -> (logits, present_…)`, `past_images` among them.

    Ids from the vocabulary's size on are entries of those. `shift` and `offsets` come before the states if tokens have
    positions on three axes.
    """

    def __init__(self, model: Any, positions: int, features: Any, contract: Contract) -> None:
        super().__init__(model, positions, features, [one.name for one in contract.states])
        self.contract = contract

    def forward(  # torch.export names inputs by it
        self, input_ids: Tensor, start: Tensor, depths: Tensor, ancestors: Tensor, logit_rows: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        axes: tuple[Tensor, ...] = ()
        if AXES in self.contract.capabilities:
            axes, past = past[:2], past[2:]
        states = dict(zip(self.names, past, strict=True))
        images = states.pop(IMAGES)
        places: Places = Places.of(start, depths, ancestors)
        if WHOLE_IMAGES in self.contract.capabilities:
            places = BothWays(*places)
        cache = ScatterCache(places, states)
        with entries_among_tokens(self.model, images, self.contract.vocab_size), turned_by(self.model, *axes):
            return self.said(input_ids, logit_rows, cache)


class TracedSeeingHead(TracedHead):
    """A head among whose tokens may be entries of images; `past_images` comes after its other states."""

    def __init__(self, head: Any, vocab_size: int) -> None:
        super().__init__(head)
        self.vocab_size = vocab_size

    def forward(
        self,
        input_ids: Tensor,
        start: Tensor,
        depths: Tensor,
        ancestors: Tensor,
        logit_rows: Tensor,
        past_hidden: Tensor,
        *past: Tensor,
    ) -> tuple[Tensor, ...]:
        *own, images = past
        with entries_among_tokens(self.head, images, self.vocab_size):
            return super().forward(input_ids, start, depths, ancestors, logit_rows, past_hidden, *own)


@contextmanager
def entries_among_tokens(model: Any, images: Tensor, vocab_size: int) -> Iterator[None]:
    """Give each id from `vocab_size` on the entry that it names [entries, size], until the block ends.

    What an entry has beyond an embedding is added after the first layers, a part after each.
    """
    table = model.get_input_embeddings()
    size = table.weight.shape[1]
    later: list[Tensor] = []

    def look_up(ids: Tensor) -> Tensor:  # [B, S]
        seen = ids >= vocab_size
        said = type(table).forward(table, torch.where(seen, 0, ids))
        found = images[torch.where(seen, ids - vocab_size, 0)]
        first, *others = torch.split(found, size, -1)
        later[:] = [torch.where(seen[:, :, None], other, 0.0) for other in others]
        return torch.where(seen[:, :, None], first, said)

    added = images.shape[1] // size - 1
    hooks = [
        layer.register_forward_hook(lambda _, __, hidden, place=place: hidden + later[place])
        for place, layer in enumerate(layers_of(model, depth_of(model))[:added] if added else ())
    ]
    try:
        with swapped(table, forward=look_up):
            yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def turned_by(model: Any, shift: Tensor | None = None, offsets: Tensor | None = None) -> Iterator[None]:
    """Let each angle of rotary positions go by its axis, until the block ends; if there are axes [B], [B, 3, S]."""
    if shift is None or offsets is None:
        yield
        return
    rotary = next(one for one in model.modules() if hasattr(one, "inv_freq") and hasattr(one, "attention_scaling"))
    axes = axes_of(len(rotary.inv_freq), model.config.image_turns)

    def turn(hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        places = position_ids[:, None] + shift[:, None, None] + offsets  # [B, 3, S]
        angles = places.transpose(1, 2)[:, :, axes].float() * rotary.inv_freq.float()  # [B, S, D / 2]
        both = torch.cat([angles, angles], -1)
        return tuple((one * rotary.attention_scaling).to(hidden.dtype) for one in (both.cos(), both.sin()))

    with swapped(rotary, forward=turn):
        yield


def axes_of(angles: int, turns: Mapping[str, Any]) -> Tensor:
    """Return the axis of each angle: time, height or width."""
    sections = turns["mrope_section"]
    if not turns.get("mrope_interleaved"):
        return torch.tensor([axis for axis, size in enumerate(sections) for _ in range(size)])
    return torch.tensor([angle % 3 if angle < 3 * sections[angle % 3] else 0 for angle in range(angles)])
