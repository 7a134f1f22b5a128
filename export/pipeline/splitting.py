"""Split the target of a bundle into shards once all else is written, and compare them with the graph that it was."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import onnx_ir as ir
from torch import Tensor

from ...engines import Contract, ExportError, Part
from ...engines.bundle import ADAPTED, FUSED, GRAPH, TARGET, shard_folder
from ..checking.check_shards import check_shards, whole_logits
from ..parallel.split import Report, split
from ..parallel.spread import Spread
from ..passes.adapt import spread, write_adapted
from ..writing.graph import require_weights


class Splitting:
    """How a target is split: into so many shards, whose sums are made in float64 if they are to be exact."""

    def __init__(self, folder: Path, shards: int, exact: bool, progress: Callable[[str], None]) -> None:
        self._folder, self._shards, self._exact, self._progress = folder, shards, exact, progress
        # The contract of the whole graph, a text, and what it says of it.
        self._said: tuple[Contract, list[int], Tensor] | None = None

    def split(self, contract: Contract, text: Sequence[int] | None) -> tuple[Contract, list[str]]:
        """Replace the target's graph by its shards; return the contract of each, and what was found."""
        folder, shards = self._folder / TARGET, self._shards
        if text is not None and shards > 1:
            self._said = contract, list(text), whole_logits(folder / GRAPH, contract, text)
        self._progress(f"{TARGET}: splitting it into {shards} shards")
        contract, found = split_with_adapters(folder, contract, shards, exact=self._exact)
        for rank in range(shards):
            require_weights(shard_folder(folder, rank) / GRAPH)
        if shards == 1:
            return contract, [f"{found.sums} sums of each call are made in float64"]
        held = f"each of {shards} shards holds {found.share:.1%} of the target's weights"
        notes = [f"{held}, and a call sums {found.sums} times"]
        return contract, notes + [f"every shard holds {name} whole: {why}" for name, why in found.whole_for.items()]

    def check(self, contract: Contract) -> list[str]:
        """Run the shards of the bundle, which is whole by now, in processes of their own."""
        if self._said is None:
            return []
        self._progress(f"{TARGET}: checking the shards in processes of their own")
        off = check_shards(self._folder / TARGET / GRAPH, contract, *self._said)
        return [f"the {self._shards} shards together: the worst logit is off by {off:.1e} deviations"]


def split_with_adapters(folder: Path, contract: Contract, shards: int, *, exact: bool) -> tuple[Contract, Report]:
    """Replace a graph by its shards, and the one with room for adapters by those made of them."""
    whole, room = ir.load(folder / GRAPH), contract.adapters
    contract, found = split(folder, contract.without_adapters, shards, exact=exact)
    if room is not None:
        (folder / (ADAPTED + FUSED)).unlink(missing_ok=True)
        room = spread(whole, room, partial(_parts, found.spreads))
        contract = replace(contract, adapters=room)
        for rank in range(shards):
            write_adapted(shard_folder(folder, rank), room, shards)
    return contract, found


def _parts(spreads: Mapping[str, Spread], value: ir.Value) -> tuple[Part, ...]:
    """Return the parts of a value's last axis of which shards have their shares; nothing if each has all of it."""
    spread = spreads.get(str(value.name))
    if spread is None:
        return ()
    if (value.shape is not None and spread.axis != len(value.shape) - 1) or spread.blocks > 1:
        raise ExportError(f"{value.name} is spread over shards along axis {spread.axis}; please report it")
    return spread.parts
