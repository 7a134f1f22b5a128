"""Bundles whose targets are in shards."""

import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trt_spec.engines import Bundle
from trt_spec.engines.torch.parallel.commands import Line
from trt_spec.engines.torch.parallel.meeting import Gathering
from trt_spec.export.parallel.split import Report
from trt_spec.export.pipeline.splitting import split_with_adapters
from trt_spec.runtime import Decoder
from trt_spec.runtime.memory.full import CacheFull

FOLLOWER = "trt_spec.engines.torch.parallel.follower"


def in_shards(bundle: Path, out: Path, shards: int, *, exact: bool = True) -> Report:
    """Write the bundle with its target in so many shards; one has it whole, with sums in float64 like the others."""
    shutil.copytree(bundle, out)
    opened = Bundle.read(out)
    contract, report = split_with_adapters(out / "target", opened.target.contract, shards, exact=exact)
    replace(opened, models=opened.models | {"target": replace(opened.target, contract=contract)}).save()
    return report


def run_with_a_preemption(decoder: Decoder) -> None:
    """Step until all requests have ended; after three steps one gives up its place."""
    for _ in range(3):
        decoder.step()
    give_up_a_place(decoder)
    while decoder.step():
        pass


def give_up_a_place(decoder: Decoder) -> None:
    with decoder.between_rounds():
        decoder._scheduler.seating.preempt(CacheFull("the test takes its place"))


def shards_of(leader: int) -> list[int]:
    """Return the processes of the shards that a process has started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == leader and FOLLOWER in (process / "cmdline").read_text():
                found.append(int(process.name))
    return found


def gathered(processes: Sequence[subprocess.Popen[bytes]], lines: Sequence[Line] = ()) -> Gathering:
    """Return what holds these processes as those of other shards, which did not meet."""
    made = Gathering.__new__(Gathering)
    made._processes, made.lines = [*processes], [*lines]
    made._ended, made._all_gone, made._why = False, False, ""
    return made
