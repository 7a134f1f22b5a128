"""The first shard and all others, which whoever opens the graph again in this process shares."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...contract import Contract
from ...errors import EngineEnded, EngineError, first_line
from ..engine import TorchEngine
from .commands import RECORD, RECORDED, RUN, Command, Packed
from .meeting import Gathering
from .picking import picking


class Team:
    """Tells the others what this process does with the first shard; one thing at a time."""

    def __init__(self, graph: Path, contract: Contract, devices: Sequence[str], compiled: bool) -> None:
        self.engine = TorchEngine(graph, contract, devices[0], compiled)
        self.picking = cache(partial(picking, self.engine, 0))
        self.users = 0
        self._unsaid: deque[Command] = deque()  # no lock: memory is forgotten wherever Python collects garbage
        self._working = threading.RLock()
        self._ended: EngineEnded | None = None
        try:
            self._others = Gathering(graph.parent.parent, devices, compiled)
        except BaseException:
            self.engine.close()
            raise

    def tell(self, command: Command) -> None:
        """Keep what the others are to do until they have to; any thread may, whenever memory is forgotten."""
        self._unsaid.append(command)

    def say(self, command: Command) -> None:
        """Let the others do something now."""
        with self._together():
            self.tell(command)
            self._send()

    def give(self, command: Command, tensors: Sequence[Tensor]) -> None:
        """Let the others do something for which they need these tensors' numbers."""
        with self._together():
            self.tell(command)
            self._send()
            for tensor in tensors:
                dist.broadcast(tensor.to(self.engine.device).contiguous(), 0)

    def run(self, number: int, step: Any, packed: Packed) -> None:
        """Run a step in all shards."""
        with self._together():
            self.tell([RUN, number])
            self._send()
            packed.pack()
            dist.broadcast(packed.whole, 0)
            step.run()

    def require(self) -> None:
        """Raise what ended the shards, also if one has gone while there was nothing to do."""
        with self._together():
            for line in self._others.lines:
                line.require()

    def gone(self) -> str:
        """Say which shard has gone, if one has, without waiting for a step; the other ones end then."""
        return self._others.gone()

    @contextmanager
    def recording(self, number: int) -> Iterator[None]:
        """Let the others record what they do until the block ends, in which nobody else may ask for anything."""
        with self._working:
            self.say([RECORD, number])
            try:
                yield
            except BaseException as error:
                if self._ended is None:
                    self._give_up(error)
                raise
            self.say([RECORDED, number])

    @property
    def ended(self) -> bool:
        return self._ended is not None

    def end(self) -> None:
        with self._working:
            self._ended = self._ended or EngineEnded("the shards have ended; open the bundle again")
            self._others.end()
            self.engine.close()

    def _send(self) -> None:
        commands = [self._unsaid.popleft() for _ in range(len(self._unsaid))]
        for line in self._others.lines:
            line.send(commands)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Turn what fails between shards into one error, with which everything after it fails, too."""
        with self._working:
            if self._ended is not None:
                raise self._ended
            try:
                yield
            except (RuntimeError, EngineError) as error:  # the others may be in the middle of it
                ended = self._give_up(error)
                if isinstance(error, torch.OutOfMemoryError):  # the decoder says how much is needed
                    raise
                raise ended from error

    def _give_up(self, error: BaseException) -> EngineEnded:
        """Let all shards end, since they are no longer in step."""
        why = self._others.who_ended() or f"the shards no longer work together ({first_line(error)})"
        self._ended = EngineEnded(f"{why}; open the bundle again")
        self._others.end(why)
        return self._ended


_open: dict[tuple[Path, tuple[str, ...], bool], Team] = {}
_opening = threading.Lock()


def team_of(graph: Path, contract: Contract, devices: Sequence[str], compiled: bool) -> Team:
    """Open the shards of a graph, or share those that this process has open; `leave` it in the end."""
    key = graph, tuple(devices), compiled
    with _opening:
        if key not in _open or _open[key].ended:
            _open[key] = Team(graph, contract, devices, compiled)
        _open[key].users += 1
        return _open[key]


def leave(team: Team) -> None:
    """Say that one fewer uses the shards, which end without any."""
    with _opening:
        team.users -= 1
        if not team.users:
            for key in [key for key, one in _open.items() if one is team]:
                del _open[key]
            team.end()
