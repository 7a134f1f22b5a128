"""Encoders at work: each reads a source once, for the rows of all models that it feeds."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import chain
from sys import maxsize
from typing import NamedTuple

import torch
from torch import Tensor

from ...engines import EncoderContract, Engine, output_name
from ..memory.adapter_pool import AdapterPool, Loaded
from ..memory.cache import nbytes
from ..memory.model import Model
from ..memory.source_rows import SourceRows
from .source import Source

MULTIPLE = 16  # tokens of a source and its padding: an engine may prepare for each length that it meets


class Wanted(NamedTuple):
    """A source that a row needs. The key is known to those that may find what was made of it."""

    key: str
    source: Source
    adapter: Loaded | None = None


class Encoder:
    """Binds an encoder's engine to the caches of the models that it feeds.

    It keeps what it has made of the last sources, up to `most_bytes`, and of the very last in any case. What it makes
    with an adapter all of these models read, drafts as they are.
    """

    def __init__(
        self,
        engine: Engine,
        contract: EncoderContract,
        models: Mapping[str, Model],
        most_bytes: int,
        adapters: AdapterPool | None = None,
    ) -> None:
        self._engine, self._contract = engine, contract
        self._adapters = adapters if contract.adapters is not None else None  # that of a draft alone has none
        self._rows = {name: _rows_of(models[name]) for name in contract.feeds if name in models}
        self._kept: OrderedDict[str, dict[str, list[Tensor]]] = OrderedDict()
        self._most = most_bytes

    @property
    def longest_text(self) -> int:
        """The most tokens that a source may have, 0 where it is sound."""
        return 0 if self._contract.sound else self._contract.longest

    @property
    def kept_bytes(self) -> int:
        """The bytes of what it has made of sources."""
        return sum(nbytes(chain(*made.values())) for made in list(self._kept.values()))

    def feeds(self, model: Model) -> bool:
        return any(rows is model.cache.sources for rows in self._rows.values())

    def lacks(self, row: int) -> bool:
        """Whether a row of the models that it feeds has nothing of a source."""
        return not next(iter(self._rows.values())).entries[row]

    def open_adapters(self) -> None:
        """Open the graph that has room for adapters, if there is one."""
        if self._adapters is not None:
            self._engine.open_adapters()

    def read(self, wanted: Mapping[int, Wanted], budget: int = maxsize) -> int:
        """Give rows of each model what there is of their sources; return how many entries had to be computed.

        What has been made of a source before is known by a key, which those share that may find it. Of the other
        sources it reads the first whatever it takes, and more within the budget.
        """
        unknown = {one.key: one for one in wanted.values() if one.key not in self._kept}
        read = 0
        while unknown and read < budget:
            some = self._together(unknown, budget - read)
            self._kept |= zip(some, self._made_of(list(some.values())), strict=True)
            unknown = {key: one for key, one in unknown.items() if key not in some}
            read += sum(self._entries(one.source) for one in some.values())
        for row, (key, *_) in wanted.items():
            if key in self._kept:
                self._kept.move_to_end(key)
                for name, made in self._kept[key].items():
                    self._rows[name].put(row, made)
        self._forget_some()
        return read

    def _together(self, wanted: Mapping[str, Wanted], budget: int) -> dict[str, Wanted]:
        """Return the first of these sources, and others of its width that the engine reads with it.

        One that has an adapter is alone.
        """
        first, *others = wanted.items()
        found, width = dict([first]), self._width(first[1].source)
        for key, one in others if self._engine.reads_together and not self._adapts(first[1]) else ():
            if self._width(one.source) == width and (len(found) + 1) * width <= budget and not self._adapts(one):
                found[key] = one
        return found

    def _adapts(self, one: Wanted) -> bool:
        return self._adapters is not None and one.adapter is not None

    def _entries(self, source: Source) -> int:
        return self._contract.longest if self._contract.sound else len(source.ids)

    def _width(self, source: Source) -> int:
        """Return how many entries an engine computes for a source, its padding among them."""
        entries = self._entries(source)
        return entries if self._contract.sound else -(-entries // MULTIPLE) * MULTIPLE

    def _made_of(self, wanted: Sequence[Wanted]) -> list[dict[str, list[Tensor]]]:
        """Return for each source, and each model that is fed, what there is for each of its states [heads, T, size]."""
        sources = [one.source for one in wanted]
        contract, device, width = self._contract, self._engine.device, self._width(sources[0])
        entries = [self._entries(source) for source in sources]
        if contract.sound:
            inputs: dict[str, Tensor] = {
                "sound": torch.stack([source.pictures[contract.sound] for source in sources]).to(device)
            }
        else:
            ids = torch.zeros(len(sources), width, dtype=torch.int64)
            for row, source in enumerate(sources):
                ids[row, : entries[row]] = torch.tensor(source.ids)
            inputs = {"source_ids": ids.to(device), "source_length": torch.tensor(entries, device=device)}
        if self._adapters is not None and wanted[0].adapter is not None:
            assert contract.adapters is not None
            inputs |= self._adapters.inputs_of(wanted[0].adapter, contract.adapters)
        made = {
            output_name(model, state): torch.zeros(
                state.memory(len(sources), width), dtype=getattr(torch, state.dtype), device=device
            )
            for model, states in contract.feeds.items()
            for state in states
        }
        self._engine.step(inputs, made).run()
        return [
            {
                model: [made[output_name(model, state)][row, :, :length] for state in contract.feeds[model]]
                for model in self._rows
            }
            for row, length in enumerate(entries)
        ]

    def _forget_some(self) -> None:
        taken = [sum(part.nbytes for each in made.values() for part in each) for made in self._kept.values()]
        while len(taken) > 1 and sum(taken) > self._most:
            taken.pop(0)
            self._kept.popitem(last=False)

    def forget(self) -> None:
        self._kept.clear()

    def close(self) -> None:
        self._engine.close()
        self._kept.clear()
        self._rows.clear()


def _rows_of(model: Model) -> SourceRows:
    sources = model.cache.sources
    assert sources is not None, "the contract of a model that is fed has states of a source"
    return sources
