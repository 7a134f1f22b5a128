"""Encoders at work: each reads a source once, for the rows of all models that it feeds."""

from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import Tensor

from ...engines import EncoderContract, Engine, output_name
from ..memory.model import Model
from ..memory.source_rows import SourceRows
from .source import Source

MULTIPLE = 16  # tokens of a source and its padding: an engine may prepare for each length that it meets


class Encoder:
    """Binds an encoder's engine to the caches of the models that it feeds.

    It keeps what it has made of the last sources, up to `most_bytes`, and of the very last in any case.
    """

    def __init__(self, engine: Engine, contract: EncoderContract, models: Mapping[str, Model], most_bytes: int) -> None:
        self._engine, self._contract = engine, contract
        self._rows = {name: _rows_of(models[name]) for name in contract.feeds if name in models}
        self._kept: OrderedDict[str, dict[str, list[Tensor]]] = OrderedDict()
        self._most = most_bytes

    def read(self, row: int, source: Source, key: str) -> int:
        """Give a row of each model what there is of a source; return how many entries had to be computed.

        What has been made of it before is known by a key, which those share that may find it.
        """
        known = key in self._kept
        if known:
            self._kept.move_to_end(key)
        else:
            self._kept[key] = self._made_of(source)
            self._forget_some()
        for name, made in self._kept[key].items():
            self._rows[name].put(row, made)
        return 0 if known else self._contract.longest if self._contract.sound else len(source.ids)

    def _made_of(self, source: Source) -> dict[str, list[Tensor]]:
        """Return for each model that is fed what there is for each of its states [heads, T, size]."""
        contract, device = self._contract, self._engine.device
        entries = contract.longest if contract.sound else len(source.ids)
        width = entries if contract.sound else -(-entries // MULTIPLE) * MULTIPLE
        if contract.sound:
            inputs = {"sound": source.pictures[contract.sound][None].to(device)}
        else:
            inputs = {"source_ids": torch.zeros(1, width, dtype=torch.int64, device=device)}
            inputs["source_ids"][0, :entries] = torch.tensor(source.ids)
            inputs["source_length"] = torch.tensor([entries], device=device)
        made = {
            output_name(model, state): torch.zeros(
                state.memory(1, width), dtype=getattr(torch, state.dtype), device=device
            )
            for model, states in contract.feeds.items()
            for state in states
        }
        self._engine.step(inputs, made).run()
        return {
            model: [made[output_name(model, state)][0, :, :entries] for state in contract.feeds[model]]
            for model in self._rows
        }

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
