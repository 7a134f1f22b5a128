"""Tries ways through a graph until one splits it."""

from collections.abc import Sequence

from torch import Tensor

from ...engines import ExportError
from ...engines.torch.onnx_graph import Graph
from .found import Found
from .spread import InParts, InUnits, Part, Repeated, Respread
from .walk import Rule, Walk

MOST_TRIES = 400


def settle(graph: Graph, whole: dict[str, Tensor], shards: int, rows: int, rules: dict[str, Rule]) -> Found:
    """Find the way in which as many matrices as possible are spread."""
    kinds: dict[str, tuple[Part, ...] | None] = {}
    whole_for: dict[str, str] = {}
    for _ in range(MOST_TRIES):
        try:
            found = Walk(graph, whole, shards, rows, kinds).run(rules)
        except Respread as asked:
            _respread(kinds, asked, whole_for)
        else:
            found.whole_for = whole_for
            return found
    raise ExportError(f"the graph was not split within {MOST_TRIES} tries; please report it")


def _respread(kinds: dict[str, tuple[Part, ...] | None], why: Respread, whole_for: dict[str, str]) -> None:
    assert why.seeds, why
    if isinstance(why, Repeated):
        kinds.update({kind: (why.part,) for kind, _ in why.seeds})
        return
    parts = [(kinds[kind] or ())[place] for kind, place in sorted(why.seeds)]
    if isinstance(why, InParts) and all(part.size == sum(why.sizes) for part in parts):
        for kind, place in why.seeds:
            _replace(kinds, kind, place, [Part(size, size) for size in why.sizes])
    elif isinstance(why, InUnits) and len(parts) == 1 and parts[0].units > why.units:  # or it would go in circles
        [(kind, place)] = why.seeds
        _replace(kinds, kind, place, [Part(parts[0].size, why.units)])
    else:
        for kind, _ in why.seeds:
            kinds[kind] = None
            if not kind.startswith("Expand "):
                whole_for[kind] = str(why)


def _replace(kinds: dict[str, tuple[Part, ...] | None], kind: str, place: int, new: Sequence[Part]) -> None:
    parts = kinds[kind]
    assert parts is not None
    kinds[kind] = (*parts[:place], *new, *parts[place + 1 :])
