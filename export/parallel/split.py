"""Write a model's graph as shards: each has its share of the weights, and says where sums over all are made."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir
import torch
from torch import Tensor

from ...engines import STATE_KINDS, Contract, ExportError, State
from ...engines.bundle import FUSED, GRAPH, WEIGHTS, shard_folder
from ...engines.torch.conversion import Recorder, run_node
from ...engines.torch.onnx_graph import Graph, read_graph
from .found import Found
from .rules import RULES
from .settle import settle
from .shard import Shard
from .spread import Spread
from .walk import NUMBERS

SIZES = {  # no two products of them are alike
    "batch": 11,
    "capacity": 97,
    "entries": 53,
    "pending": 29,
    "rows": 7,
    "slots": 62,
    "source": 41,
    "tail": 37,
    "width": 13,
}


@dataclass(frozen=True)
class Report:
    """What was found of a graph that was split."""

    sums: int  # between shards in each call
    share: float  # of the weights, that each shard holds
    whole_for: Mapping[str, str]  # what every shard holds whole, and why
    spreads: Mapping[str, Spread]  # of the values of the whole graph


def split(folder: Path, contract: Contract, shards: int, *, exact: bool = False) -> tuple[Contract, Report]:
    """Replace a graph by its shards; return the contract of each, and what was found.

    The first lies where the graph was, the others in folders of their numbers. Terms of sums between them are computed
    in float64 if the sums are to be `exact`, so that their order does not matter.
    """
    graph = read_graph(folder / GRAPH)
    found = settle(graph, _whole(graph, contract), shards, contract.vocab_size, RULES)
    contract = replace(_contract(contract, found, shards), shards=shards)
    if not found.cuts:
        raise ExportError(f"nothing of the {folder.name} can be split into {shards} shards; export it whole")
    before = (folder / WEIGHTS).stat().st_size
    aside = folder / "whole"
    aside.mkdir()
    for name in (GRAPH, WEIGHTS):
        (folder / name).rename(aside / name)
    (folder / FUSED).unlink(missing_ok=True)
    for rank in range(shards):
        model = ir.load(aside / GRAPH)
        Shard(model, contract, found, rank, shards, exact).apply()
        place = shard_folder(folder, rank)
        place.mkdir(exist_ok=True)
        ir.save(model, place / GRAPH, external_data=WEIGHTS, size_threshold_bytes=1024, max_workers=1)
    shutil.rmtree(aside)
    each = (folder / WEIGHTS).stat().st_size
    return contract, Report(len(set(found.sums)), each / before, found.whole_for, found.spreads)


def _whole(graph: Graph, contract: Contract) -> dict[str, Tensor]:
    """Return every value of the graph as a tensor without data, but numbers that sizes are made of."""
    recorder = Recorder("cpu")
    values: dict[str, Tensor] = {
        name: each if each.numel() <= NUMBERS else torch.empty_like(each, device="meta")
        for name, each in graph.constants.items()
    }
    for spec in contract.inputs:
        values[spec.name] = recorder.input(spec, SIZES)
    with recorder:
        for node in graph.nodes:
            run_node(node, values)
    return values


def _contract(contract: Contract, found: Found, shards: int) -> Contract:
    states = []
    for state in contract.states:
        spread = found.spreads.get(f"past_{state.name}")
        states.append(state if spread is None else _state(state, spread, shards))
    return replace(contract, heads=found.heads_of_queries or contract.heads, states=tuple(states))


def _state(state: State, spread: Spread, shards: int) -> State:
    of_entries = bool(STATE_KINDS[state.kind].capacity)  # [rows, heads, entries, size]
    axis = spread.axis - 1 - (of_entries and spread.axis > 2)
    return replace(state, shape=(*state.shape[:axis], spread.share(shards), *state.shape[axis + 1 :]))
