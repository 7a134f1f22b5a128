"""Divides the cores among sessions that take turns."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..bundle import WEIGHTS
from ..cores import usable_cores

SMALL_BYTES = 8 * 2**20  # one thread reads this many weights before others have woken up


@dataclass(frozen=True)
class Threads:
    """The number of threads of a session, and whether they stay awake for a while after a run."""

    count: int
    stay_awake: bool


def share_threads(graphs: Sequence[Path], alone: bool = True) -> list[Threads]:
    """Divide the cores among models that take turns in a round.

    On a small machine, a worker of one model that spins while another model runs doubles the other's time. A worker
    that sleeps must be woken, which costs each run as much as a whole run of a small model. So a small model has one
    thread, a single large model keeps its workers awake, and several large ones send theirs to sleep after each run.
    So does a large model that is not `alone`, because another engine runs the other models.
    """
    small = [_weight_bytes(graph) <= SMALL_BYTES for graph in graphs]
    alone = alone and small.count(False) == 1
    cores = usable_cores()  # the library's default counts the machine's
    return [Threads(1, stay_awake=False) if is_small else Threads(cores, stay_awake=alone) for is_small in small]


def _weight_bytes(graph: Path) -> int:
    return sum(file.stat().st_size for file in (graph, graph.with_name(WEIGHTS)) if file.exists())
