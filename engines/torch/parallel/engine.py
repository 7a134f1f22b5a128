"""The engine of a target in shards: this process runs the first, and the others do the same with theirs."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import count
from pathlib import Path

from torch import Tensor

from ...contract import Contract, Part
from ...engine import Engine, Step
from .commands import DROP, REPLAY, STEP, Packed, dtype_name
from .mirrored import MEMORY, SIZES, Mirrored, local, mirrored, share_out
from .team import Team, leave, team_of

_numbers = count()  # of steps and records


class ShardedEngine(Engine):
    """Runs a graph in shards, each on a device of its own. Memory of the caller's is there in all of them."""

    def __init__(self, graph: Path, contract: Contract, devices: Sequence[str], compiled: bool) -> None:
        self.contract, self.device = contract, devices[0]
        self._team = team_of(graph, contract, devices, compiled)
        self._records: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._open, self._among = True, 0
        own = self._own = self._team.engine
        self.static_capacity, self.reads_prefixes = own.static_capacity, own.reads_prefixes
        self.reads_live, self.logits_dtype = own.reads_live, own.logits_dtype

    def everywhere(self, memory: Tensor) -> Tensor:
        return mirrored(memory, self._team)

    def put(self, memory: Tensor, numbers: Tensor, axis: int = 0, parts: Sequence[Part] = ()) -> None:
        share_out(memory, numbers, axis, parts, self.contract.shards)

    def step(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Step:
        own = self._team.picking(self._among) if self._among else self._own
        step = own.step(*({name: local(one) for name, one in some.items()} for some in (inputs, outputs)))
        given = [name for name, one in inputs.items() if not isinstance(one, Mirrored)]
        run = _Run(self._team, next(_numbers), step, Packed([inputs[name] for name in given], self.device))
        self._team.tell([STEP, run.number, _named(inputs), _named(outputs), given, self._among])
        return Step(inputs, outputs, run)

    def open_adapters(self) -> None:
        self._own.open_adapters()

    def require(self) -> None:
        self._team.require()

    def gone(self) -> str:
        return self._team.gone()

    def picking(self, vocab_size: int) -> Engine:
        other = copy(self)
        other._among = vocab_size
        return other

    def capturable(self) -> bool:
        return self._own.capturable()

    @contextmanager
    def recording(self, record: object) -> Iterator[None]:
        number = self._records[record] = next(_numbers)
        weakref.finalize(record, self._team.tell, [DROP, number])
        with self._team.recording(number):
            yield

    def replay(self, record: object) -> None:
        self._team.say([REPLAY, self._records[record]])

    def prefill_widths(self, tokens: int) -> list[int]:
        return self._own.prefill_widths(tokens)

    def step_bytes(self, rows: int, capacity: int) -> int:
        return self._own.step_bytes(rows, capacity)

    def close(self) -> None:
        if self._open:
            self._open = False
            leave(self._team)


class _Run:
    """Runs a step in all shards, which forget theirs with it."""

    def __init__(self, team: Team, number: int, step: Step, packed: Packed) -> None:
        self.number = number
        self._team, self._step, self._packed = team, step, packed
        weakref.finalize(self, team.tell, [DROP, number])

    def __call__(self) -> None:
        self._team.run(self.number, self._step, self._packed)


def _named(tensors: Mapping[str, Tensor]) -> dict[str, object]:
    """Say of each tensor which memory of all shards it is, or its size, where only the first shard has it."""
    return {
        name: {MEMORY: one.number} if isinstance(one, Mirrored) else {SIZES: [list(one.shape), dtype_name(one.dtype)]}
        for name, one in tensors.items()
    }
