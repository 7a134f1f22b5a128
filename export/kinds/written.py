"""A head's written graph in an engine, called as a round calls it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...engines import Engine, blank_cache, make_step

GARBAGE = 1e3  # what no slot may read


@dataclass(frozen=True)
class Cached:
    """A graph and a cache that it writes to, full of garbage at first."""

    engine: Engine
    cache: dict[str, Tensor]

    @classmethod
    def of(cls, engine: Engine, rows: int, capacity: int) -> "Cached":
        cache = blank_cache(engine.contract, rows, capacity)
        for name in engine.contract.cache_names:
            cache[name].fill_(GARBAGE)
        return cls(engine, cache)

    def call(self, ids: Tensor, start: list[int], given: Tensor, rows: Tensor, **tree: Tensor) -> tuple[Tensor, Tensor]:
        """Read tokens [B, S] with what their slots are given [B, S, hidden], in a line, or in the `tree` of a call.

        Return the logits [B, R, V] of these rows of them [B, R], and what was made there [B, R, hidden].
        """
        inputs = {"input_ids": ids, "past_hidden": given, "logit_rows": rows} | tree
        logits = torch.zeros(*rows.shape, self.engine.contract.vocab_size)
        made = torch.zeros(*rows.shape, given.shape[2])
        inputs = {name: each.contiguous() for name, each in inputs.items()} | {"start": torch.tensor(start)}
        make_step(self.engine, self.cache, inputs, {"logits": logits, "present_hidden": made}).run()
        return logits, made
