"""A shard's process that does what the leading one says, until that ends."""

import argparse
import os
import signal
import sys
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ...bundle import GRAPH, Bundle, shard_folder
from ...engine import Step
from ...errors import EngineError, first_line
from ..engine import TorchEngine
from .commands import (
    COMPUTE,
    DROP,
    END,
    FORGET,
    MAKE,
    RECORD,
    RECORDED,
    REPLAY,
    RUN,
    SHARE,
    STEP,
    Command,
    Line,
    Packed,
)
from .meeting import GONE, Attending, Group, device_by_torchrun
from .mirrored import MEMORY, SIZES, compute, take_share
from .picking import picking


class Follower:
    def __init__(self, engine: TorchEngine, rank: int, line: Line) -> None:
        self._engine, self._rank, self._line, self._device = engine, rank, line, engine.device
        self._picking = cache(partial(picking, engine, rank))
        self._memory: dict[int, Tensor] = {}
        self._steps: dict[int, tuple[Step, Packed]] = {}
        self._records: dict[int, torch.cuda.CUDAGraph] = {}
        self._recording = ExitStack()

    def follow(self) -> None:
        """Do what the leader says until it ends, or has gone."""
        with torch.inference_mode():
            while True:
                for command in self._line.receive():
                    if command[0] == END:
                        return
                    self._do(command)

    def _do(self, command: Command) -> None:
        name, *rest = command
        if name == MAKE:
            number, shape, dtype = rest
            self._memory[number] = torch.zeros(shape, dtype=getattr(torch, dtype), device=self._device)
        elif name == COMPUTE:
            compute(command, self._memory, self._take, self._device)
        elif name == SHARE:
            take_share(command, self._memory, self._take, self._rank)
        elif name == FORGET:
            self._memory.pop(rest[0], None)
        elif name == STEP:
            self._make_step(*rest)
        elif name == RUN:
            step, packed = self._steps[rest[0]]
            dist.broadcast(packed.whole, 0)
            packed.unpack()
            step.run()
        elif name == DROP:
            self._steps.pop(rest[0], None)
            self._records.pop(rest[0], None)
        elif name == RECORD:
            graph = self._records[rest[0]] = torch.cuda.CUDAGraph()
            self._recording.enter_context(torch.cuda.graph(graph, capture_error_mode="thread_local"))
        elif name == RECORDED:
            self._recording.close()
        elif name == REPLAY:
            self._records[rest[0]].replay()

    def _take(self, shape: list[int], dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        dist.broadcast(tensor, 0)
        return tensor

    def _make_step(
        self, number: int, inputs: dict[str, object], outputs: dict[str, object], packed: list[str], among: int
    ) -> None:
        def tensor(value: object) -> Tensor:
            assert isinstance(value, dict)
            if MEMORY in value:
                return self._memory[value[MEMORY]]
            shape, dtype = value[SIZES]
            return torch.zeros(shape, dtype=getattr(torch, dtype), device=self._device)

        given = {name: tensor(value) for name, value in inputs.items()}
        engine = self._picking(among) if among else self._engine
        step = engine.step(given, {name: tensor(value) for name, value in outputs.items()})
        self._steps[number] = step, Packed([given[name] for name in packed], self._device)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run one shard of a bundle's target. The engine torch starts this.")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--compiled", action="store_true")
    asked = parser.parse_args()
    follow(asked.bundle, asked.rank, asked.device, compiled=asked.compiled)


def follow(folder: Path, rank: int, device: str, *, compiled: bool = False) -> NoReturn:
    """Run one shard of the target until the leader ends, and this process with it.

    Python itself must not end: a thread of the group that lets go of a tensor meanwhile would abort the process, and
    whoever leaves the group first may wait for the others.
    """
    try:
        _follow(folder, rank, device, compiled)
        status = 0
    except (EngineError, RuntimeError, OSError) as error:  # the leader says what has failed, if it is there
        print(f"shard {rank} of the target ends: {first_line(error)}", file=sys.stderr)
        status = GONE
    sys.stderr.flush()
    os._exit(status)


def _follow(folder: Path, rank: int, device: str, compiled: bool) -> None:
    device = device_by_torchrun(device)
    bundle = Bundle.read(folder)  # the leader has verified its files
    contract, graph = bundle.target.contract, bundle.graph(bundle.names[0])
    attending = Attending(Group(rank, contract.shards), device)
    try:
        engine = TorchEngine(shard_folder(graph.parent, rank) / GRAPH, contract, device, compiled)
    except EngineError as error:
        attending.failed(str(error))
        return
    attending.ready()
    for number in (signal.SIGINT, signal.SIGTERM):  # the leader ends when its requests have ended, and this with it
        signal.signal(number, signal.SIG_IGN)
    Follower(engine, rank, attending.line).follow()


if __name__ == "__main__":
    main()
