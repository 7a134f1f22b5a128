"""Join heads and look-aheads to their target, once that is loaded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...engines import CALL, FEATURES, Contract, State
from ...engines.bundle import TARGET
from ..checking.bigram import bigram_overlap
from ..checking.quality import Sample
from ..tracing.hidden_states import Features
from .heads import HeadCheckpoint, LoadedHead
from .look_aheads import LookAheads

MEASURED = 4096  # tokens of the text on which a head is measured


@dataclass(frozen=True)
class Joined:
    """A target's contract, and what is joined to it."""

    contract: Contract
    heads: Mapping[str, LoadedHead] = field(default_factory=dict)  # by kind
    look_aheads: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def features(self) -> dict[str, Features]:
        return {name: head.features for name, head in self.heads.items()}


@dataclass(frozen=True)
class Joining:
    """What is to be joined to a target, still unread."""

    heads: Mapping[str, HeadCheckpoint] = field(default_factory=dict)  # by kind
    look_aheads: LookAheads | None = None

    @property
    def names(self) -> list[str]:
        """The names that users gave."""
        return [one.name for one in (*self.heads.values(), *([self.look_aheads] if self.look_aheads else []))]

    def join_to(self, target: Any, contract: Contract, text: Sample | None, progress: Callable[[str], None]) -> Joined:
        """Wire all heads as they work best on a text, and let the target read the look-aheads."""
        if not self.names:
            return Joined(contract)
        assert text is not None, "there is a text where something joins"
        some, loaded = text.first(MEASURED), dict[str, LoadedHead]()
        bigram = bigram_overlap(target, some) if self.heads else None
        for name, head in self.heads.items():
            progress(f"{name}: joining {head.name} to its target")
            loaded[name] = head.kind.load(head, target, contract, some).beside(head.name, bigram)
        contract = with_features(contract, loaded)
        if self.look_aheads is None:
            return Joined(contract, loaded)
        progress(f"{TARGET}: joining the look-aheads of {self.look_aheads.name}")
        count = self.look_aheads.join(target, contract.vocab_size)
        return Joined(contract, loaded, count, [self.look_aheads.measured(target, contract, text, count)])


def with_features(contract: Contract, heads: Mapping[str, LoadedHead]) -> Contract:
    """Return the contract of a target that keeps features for these heads, side by side.

    They are one state: TensorRT for RTX crashes over two of one shape.
    """
    if not heads:
        return contract
    width = sum(state.shape[0] for head in heads.values() for state in head.contract.of_kind(CALL))
    return replace(contract, states=(State(FEATURES, (1, width), contract.dtype), *contract.states))
