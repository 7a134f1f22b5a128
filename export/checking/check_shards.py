"""Compare the shards of a graph, each in a process of its own, with the graph that they were made of."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...engines import (
    GRANULE,
    IMAGES,
    SOURCE,
    Contract,
    Engine,
    ExportError,
    blank_cache,
    blank_step,
    heads_in_parts,
    open_engine,
    open_engines,
)
from .quality import engine_logits

ENGINE = "torch"
MOST_SEEN = 16  # tokens of the text that are read with an image
TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}  # of the scale: sums are made in another order
OF_ROUNDED = 1e-1  # of a cache in eight bits, in which a last bit more makes an entry the next number


def whole_logits(graph: Path, contract: Contract, tokens: Sequence[int]) -> Tensor:
    """Return the logits [L, V] of the text, by the graph as it is before it is split."""
    engine = open_engine(ENGINE, graph, contract)
    try:
        return _logits(engine, contract, tokens)
    finally:
        engine.close()


def _logits(engine: Engine, whole: Contract, tokens: Sequence[int]) -> Tensor:
    """Return the logits of the text, after a random source if the graph reads one.

    If it sees, those of the text's beginning follow with an entry of an image among its tokens.
    """
    found = engine_logits(engine, list(tokens), dict(_source(engine, whole)))
    return torch.cat([found, _seeing(engine, tokens[:MOST_SEEN])]) if whole.image_size else found


def _source(engine: Engine, whole: Contract) -> Iterator[tuple[str, Tensor]]:
    """Give the states of a source, of which each shard gets its heads."""
    generator = torch.Generator().manual_seed(0)
    for state, own in zip(whole.of_kind(SOURCE), engine.contract.of_kind(SOURCE), strict=True):
        dtype = getattr(torch, own.dtype)
        numbers = torch.randn(state.memory(1, GRANULE), generator=generator).to(dtype)
        memory = engine.everywhere(torch.zeros(own.memory(1, GRANULE), dtype=dtype, device=engine.device))
        engine.put(memory, numbers, 1, heads_in_parts(state.shape[0], own.shape[0]))
        yield own.name, memory


def _seeing(engine: Engine, tokens: Sequence[int]) -> Tensor:
    contract = engine.contract
    cache = blank_cache(contract, 1, len(tokens), engine.device)
    cache |= {state.name: engine.everywhere(cache[state.name]) for state in contract.kept}
    step = blank_step(engine, cache, 0, 1, len(tokens), len(tokens))
    step.input_ids[0] = torch.tensor(tokens)
    step.input_ids[0, ::2] = contract.vocab_size  # the first entry
    entry = torch.randn(contract.image_size, generator=torch.Generator().manual_seed(0))
    step.inputs[f"past_{IMAGES}"].copy_(entry)
    step.run()
    return step.logits[0]


def check_shards(graph: Path, contract: Contract, whole: Contract, tokens: Sequence[int], wanted: Tensor) -> float:
    """Return by how much the worst logit of the shards differs, in standard deviations of all."""
    [engine] = open_engines(ENGINE, [(graph, contract)], devices=["cpu"] * contract.shards)
    try:
        found = _logits(engine, whole, tokens)
    finally:
        engine.close()
    off = float((found - wanted).abs().max() / wanted.std())
    if not off <= (OF_ROUNDED if contract.rounded_to else TOLERANCE[contract.dtype]):
        raise ExportError(
            f"the {contract.shards} shards of the {graph.parent.name} do not compute what the whole graph does: a "
            f"logit is off by {off:.2g} standard deviations; export it whole, and please report it"
        )
    return off
