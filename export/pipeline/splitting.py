"""Split the target of a bundle into shards once all else is written, and compare them with the graph that it was."""

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from ...engines import Contract
from ...engines.bundle import GRAPH, TARGET
from ..checking.check_shards import check_shards, whole_logits
from ..parallel.split import split


class Splitting:
    """How a target is split: into so many shards, whose sums are made in float64 if they are to be exact."""

    def __init__(self, folder: Path, shards: int, exact: bool, progress: Callable[[str], None]) -> None:
        self._folder, self._shards, self._exact, self._progress = folder, shards, exact, progress
        self._said: tuple[list[int], Tensor] | None = None  # a text, and what the whole graph says of it

    def split(self, contract: Contract, text: Sequence[int] | None) -> tuple[Contract, list[str]]:
        """Replace the target's graph by its shards; return the contract of each, and what was found."""
        folder, shards = self._folder / TARGET, self._shards
        if text is not None and shards > 1:
            self._said = list(text), whole_logits(folder / GRAPH, contract, text)
        self._progress(f"{TARGET}: splitting it into {shards} shards")
        contract, found = split(folder, contract, shards, exact=self._exact)
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
