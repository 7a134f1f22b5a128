"""Compare what a vision graph and its target's make of an image with what the checkpoint as a whole makes of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...engines import (
    AXES,
    IMAGES,
    WHOLE_IMAGES,
    Contract,
    Engine,
    VisionContract,
    blank_cache,
    cache_rows,
    line,
    make_step,
    open_engine,
)
from ..checking.check import Errors, in_float32, unrounded
from .families import family_of
from .tower import Given

BEFORE, AFTER = 5, 9  # tokens of text around the image: the target reads some of those after it in a second call
LATER = 6


@dataclass(frozen=True)
class Seen:
    """What a checkpoint as a whole makes of an image, and of a prompt with it."""

    given: Given  # to the vision graph
    entries: Tensor  # [entries, size]
    ids: Tensor  # [S], of which those from the vocabulary's size on are entries
    positions: Tensor  # [3, S]
    logits: Tensor  # [S, V]


@torch.no_grad()
def seen_by(whole: Any, vocab_size: int) -> Seen:
    """Let a whole checkpoint, in float32, read an image, and a prompt with it."""
    family, config = family_of(whole.config), whole.config
    example = family.example(config)
    entries = entries_of(whole.model.get_image_features(**example))
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(config.image_token_id, (BEFORE + AFTER,), generator=generator)
    image = torch.full((len(entries),), config.image_token_id)
    ids = torch.cat([text[:BEFORE], image, text[BEFORE:]])
    of_image = ids == config.image_token_id
    asked = {"input_ids": ids[None]} | dict(example)
    if WHOLE_IMAGES in family.capabilities:
        asked["token_type_ids"] = of_image.long()[None]
    positions = torch.arange(len(ids)).expand(3, -1)
    if AXES in family.capabilities:
        asked["mm_token_type_ids"] = of_image.long()[None]
        positions = whole.model.get_rope_index(asked["input_ids"], asked["mm_token_type_ids"], asked["image_grid_thw"])
        positions = positions[0][:, 0]
    logits = whole(**asked).logits[0]
    named = ids.clone()
    named[of_image] = vocab_size + torch.arange(len(entries))
    return Seen(family.of_whole(example), entries, named, positions, logits)


def entries_of(made: Any) -> Tensor:
    """Return what transformers makes of one image [entries, size]."""

    def flat(found: Any) -> Tensor:
        return torch.cat(list(found)) if isinstance(found, list | tuple) else found.flatten(0, -2)

    return torch.cat([flat(each) for each in (made.pooler_output, *getattr(made, "deepstack_features", ()))], -1)


def check_vision(graph: Path, contract: VisionContract, seen: Seen, quantised: bool) -> dict[str, Any]:
    """Refuse a vision graph that gives other entries; returns the errors, in standard deviations, for the manifest."""
    errors = Errors(1.0)
    with in_float32(graph, contract) as (graph, contract):
        engine = open_engine("onnxruntime", graph, contract, exact_weights=quantised)
        try:
            found = torch.zeros_like(seen.entries)
            engine.step(seen.given, {IMAGES: found}).run()
        finally:
            engine.close()
    errors.compare(IMAGES, found, seen.entries, float(seen.entries.std()))
    return errors.report(graph) | {"as_float32_copy": contract.dtype != "float32"}


def check_seeing(graph: Path, contract: Contract, seen: Seen) -> dict[str, Any]:
    """Refuse a target's graph that says other things of a prompt with an image than its whole checkpoint."""
    errors = Errors(float(seen.logits.std()))
    with in_float32(graph, contract) as (graph, contract), unrounded(graph, contract) as (graph, contract):
        engine = open_engine("onnxruntime", graph, contract)
        try:
            found = _read(engine, seen)
        finally:
            engine.close()
    errors.compare(IMAGES, found, seen.logits[:, : found.shape[1]])
    return errors.report(graph)


def _read(engine: Engine, seen: Seen) -> Tensor:
    """Read the prompt in two calls; return the logits of all its tokens [S, V]."""
    contract, found = engine.contract, []
    cache = blank_cache(contract, 1, len(seen.ids))
    begin = 0
    for width in (len(seen.ids) - LATER, LATER):
        ids = seen.ids[begin : begin + width]
        inputs: dict[str, Tensor] = {"input_ids": ids[None].contiguous(), "start": torch.tensor([begin])}
        inputs[f"past_{IMAGES}"] = seen.entries
        if WHOLE_IMAGES in contract.capabilities:
            inputs |= line(1, width, engine.device)
            inputs["ancestors"] |= both_ways(ids >= contract.vocab_size)
        if AXES in contract.capabilities:
            own = seen.positions[:, begin : begin + width]
            inputs["offsets"] = (own - torch.arange(begin, begin + width))[None].contiguous()
        logits = torch.zeros(1, width, contract.vocab_size)
        make_step(engine, cache_rows(contract, cache, 0, 1), inputs, {"logits": logits}).run()
        found.append(logits[0])
        begin += width
    return torch.cat(found)


def both_ways(of_image: Tensor) -> Tensor:
    """Return which tokens of a call [S, S] belong to its image."""
    return of_image[:, None] & of_image
