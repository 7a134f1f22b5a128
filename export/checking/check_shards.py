"""Compare the shards of a graph, each in a process of its own, with the graph that they were made of."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...engines import (
    ADAPTER,
    GRANULE,
    IMAGES,
    OWNERS,
    SOURCE,
    Adapters,
    Contract,
    Engine,
    ExportError,
    Step,
    blank_cache,
    cache_rows,
    heads_in_parts,
    make_step,
    open_engine,
    open_engines,
)
from .quality import engine_logits

ENGINE = "torch"
MOST_READ_MORE = 8  # tokens of the text that are read in two rows, with an image, and with an adapter
ROWS = 2
SIZE = 0.3  # of what a random adapter adds, beside what it reads
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

    Those of the text's beginning follow, in one call with its end read backwards: what is cut along its rows is right
    for a single one. If it sees, there are those with entries of images among the tokens, too; if it has room for
    adapters, those whose first row has a random one.
    """
    source, texts = dict(_source(engine, whole)), [tokens[:MOST_READ_MORE], tokens[::-1][:MOST_READ_MORE]]
    found = [engine_logits(engine, list(tokens), source)]
    steps = [_step(engine, source, texts, {})]
    if whole.image_size:
        steps.append(seeing := _step(engine, source, texts, {}))
        seeing.input_ids[:, ::2] = whole.vocab_size  # the first entry
        entry = torch.randn(whole.image_size, generator=torch.Generator().manual_seed(0))
        seeing.inputs[f"past_{IMAGES}"].copy_(entry)
    if engine.contract.adapters is not None:
        steps.append(_step(engine, source, texts, _adapter(engine, engine.contract.adapters)))
    for step in steps:
        step.run()
        found += step.logits
    return torch.cat(found)


def _source(engine: Engine, whole: Contract) -> Iterator[tuple[str, Tensor]]:
    """Give the states of a source, of which each shard gets its heads."""
    generator = torch.Generator().manual_seed(0)
    for state, own in zip(whole.of_kind(SOURCE), engine.contract.of_kind(SOURCE), strict=True):
        dtype = getattr(torch, own.dtype)
        numbers = torch.randn(state.memory(ROWS, GRANULE), generator=generator).to(dtype)
        memory = engine.everywhere(torch.zeros(own.memory(ROWS, GRANULE), dtype=dtype, device=engine.device))
        engine.put(memory, numbers, 1, heads_in_parts(state.shape[0], own.shape[0]))
        yield own.name, memory


def _adapter(engine: Engine, room: Adapters) -> dict[str, Tensor]:
    """Return what a call is given whose first row has a random adapter, of which each shard gets its share."""
    generator, device, dtype = torch.Generator().manual_seed(0), engine.device, getattr(torch, engine.contract.dtype)
    given = {
        name: engine.everywhere(torch.zeros(room.rank, width, dtype=dtype, device=device))
        for name, width in room.widths(engine.contract.shards).items()
    }
    for one in room.products:
        for name, width, parts in one.matrices:
            size = SIZE / one.inputs**0.5 if name == one.down else SIZE
            numbers = torch.randn(room.rank, width, generator=generator) * size
            engine.put(given[name], numbers.to(dtype), 1, parts)
    of_rows = torch.tensor([1, 0], device=device)
    return given | {ADAPTER: of_rows, OWNERS: torch.ones(room.rank, dtype=torch.int64, device=device)}


def _step(
    engine: Engine, source: Mapping[str, Tensor], texts: Sequence[Sequence[int]], given: Mapping[str, Tensor]
) -> Step:
    """Make a step that reads short texts of one length at once, each in a row."""
    contract, rows, width = engine.contract, len(texts), len(texts[0])
    cache = blank_cache(contract, rows, width, engine.device)
    cache |= {state.name: engine.everywhere(cache[state.name]) for state in contract.kept} | dict(source)
    inputs = {
        "input_ids": torch.tensor([list(text) for text in texts], device=engine.device),
        "start": torch.zeros(rows, dtype=torch.int64, device=engine.device),
        **given,
    }
    if contract.recurrent:
        inputs["fold"] = torch.full((rows,), width, device=engine.device)
    logits = torch.zeros(rows, width, contract.vocab_size, device=engine.device)
    return make_step(engine, cache_rows(contract, cache, 0, rows), inputs, {"logits": logits})


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
