"""The costs of rounds: `trt-spec tune` measures them, and the bundle keeps a file for each engine and device."""

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engines import Bundle, BundleError, RequestError, usable_cores
from ...engines.bundle import COSTS, graph_identity
from ...engines.bundle.whole_files import write_whole
from ..state.asked import MIXED, NONE
from ..state.shapes import Shape, read_shape

FORMAT = 1
BEFORE_TREES = {"siblings": "beside", "siblings_ms": "beside_ms", "sibling_acceptance": "beside_tokens"}
STIFFNESS = 1.0  # weight of a bend in the times over K, against a distance from the measured times
TUNE = "trt-spec tune {bundle} --engine {engine} --device {device}"


@dataclass(frozen=True)
class Costs:
    """Times of whole rounds, and the acceptance with which a request's estimates begin."""

    engine: str
    device: str
    machine: str  # the name of the processor or GPU that was measured
    models: dict[str, str]  # identity of each graph, by name
    batches: tuple[int, ...]
    draft_lengths: tuple[int, ...]  # begins with 0
    round_ms: dict[str, tuple[tuple[float, ...], ...]]  # by drafter: [batch][draft length]
    acceptance: dict[str, float]  # by drafter, over all prompts: accepted ÷ examined
    proposing: dict[str, float]  # by drafter: share of rounds in which it proposes anything
    beside: tuple[int | str, ...] = ()  # what was measured beside a line: so many siblings, rising; then trees as 4/8
    beside_ms: dict[str, tuple[tuple[float, ...], ...]] = field(default_factory=dict)  # by drafter: [batch][beside]
    beside_tokens: dict[str, tuple[float, ...]] = field(default_factory=dict)  # accepted where the line is rejected
    reading_ms: dict[str, tuple[float, float]] = field(default_factory=dict)  # by drafter: a call, each of its tokens

    def __post_init__(self) -> None:
        for name, numbers in (("batches", self.batches), ("draft_lengths", self.draft_lengths)):
            if not numbers or not all(type(n) is int for n in numbers) or any(a >= b for a, b in pairwise(numbers)):
                raise ValueError(f"{name} are {list(numbers)}, expected rising whole numbers")
        if self.batches[0] < 1 or self.draft_lengths[0] != 0:
            raise ValueError("batches must begin with at least 1 and draft_lengths with 0")
        for drafter, table in self.round_ms.items():
            times = [time for row in table for time in row]
            if len(times) != len(self.batches) * len(self.draft_lengths) or not all(0 < t < 1e9 for t in times):
                raise ValueError(f"the times of {drafter} are not a table of milliseconds")
            for shares in (self.acceptance, self.proposing):
                if not 0 <= shares[drafter] <= 1:
                    raise ValueError(f"a share of {drafter} is {shares[drafter]}, expected a number from 0 to 1")
        if not self.round_ms:
            raise ValueError("no drafter was measured")
        siblings, trees = self.siblings, self.trees
        rising = all(a < b for a, b in pairwise((0, *siblings))) and all(tree.beyond > 0 for tree in trees)
        if not rising or list(self.beside) != [*siblings, *map(str, trees)]:
            raise ValueError(f"beside is {list(self.beside)}, expected rising numbers of siblings, then trees like 4/8")
        if self.beside_ms.keys() != self.beside_tokens.keys():
            raise ValueError("what is beside lines was timed for other drafters than it was counted for")
        for drafter, table in self.beside_ms.items():
            times = [time for row in table for time in row]
            if len(times) != len(self.batches) * len(self.beside) or not all(0 <= t < 1e9 for t in times):
                raise ValueError(f"what is beside lines of {drafter} has no table of milliseconds")
            accepted, most = self.beside_tokens[drafter], [*(1 for _ in siblings), *(tree.length for tree in trees)]
            pairs = zip(accepted, most, strict=False)
            if len(accepted) != len(most) or not all(0 <= tokens <= top for tokens, top in pairs):
                raise ValueError(f"beside lines of {drafter} {list(accepted)} tokens count, expected at most {most}")
        for drafter, parts in self.reading_ms.items():
            if len(parts) != 2 or not all(0 <= t < 1e9 for t in parts):
                raise ValueError(f"what drafter {drafter} takes to read is {list(parts)}, expected two times")

    @property
    def longest(self) -> int:
        return self.draft_lengths[-1]

    def round_times(self, drafter: str, batch: int) -> list[float]:
        """Return the milliseconds of a round for K = 0 … longest: smooth over K, straight lines between batches."""
        table = np.array(self.round_ms[drafter])
        at_batch = np.array([np.interp(batch, self.batches, times) for times in table.T])
        return [float(at_batch[0]), *smoothed(np.array(self.draft_lengths[1:]), at_batch[1:])]

    @property
    def siblings(self) -> list[int]:
        return [one for one in self.beside if type(one) is int]

    @property
    def trees(self) -> list[Shape]:
        return [tree for one in self.beside if isinstance(one, str) and (tree := read_shape(one)) and not tree.leaves]

    def times_beside(self, drafter: str, batch: int) -> list[float]:
        """Return the milliseconds that each shape adds to a round of its line, straight between batches."""
        table, few = np.array(self.beside_ms[drafter]), len(self.siblings)
        times = np.array([np.interp(batch, self.batches, column) for column in table.T])
        times[:few] = np.maximum.accumulate(times[:few])  # more siblings never take less
        return [float(ms) for ms in times]

    def save(self, bundle: Bundle) -> Path:
        path = costs_file(bundle.path, self.engine, self.device)
        try:
            path.parent.mkdir(exist_ok=True)
            write_whole(path, (json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n").encode())
        except OSError as error:
            raise BundleError(f"{path} cannot be written ({error.strerror}); make room or give access") from error
        return path


def smoothed(lengths: NDArray[np.int64], times: NDArray[np.float64]) -> list[float]:
    """Return times for K = 1 … the longest that never decrease, stay close to the measured ones and bend little.

    Otherwise one time that is off by a few percent, as on a busy machine, would make its K look best or worst for good.
    Times on a straight line stay as they are.
    """
    if not len(lengths):
        return []
    if len(lengths) == 1:  # nothing says how it bends, or rises
        return [float(times[0])] * int(lengths[0])
    every, scale = int(lengths[-1]), 1 / times
    measured = np.zeros((len(lengths), every))
    measured[np.arange(len(lengths)), lengths - 1] = scale
    bends = STIFFNESS * np.diff(np.eye(every), 2, axis=0) * scale.mean()
    found, *_ = np.linalg.lstsq(np.vstack([measured, bends]), np.r_[np.ones(len(lengths)), np.zeros(len(bends))])
    return [float(ms) for ms in np.maximum.accumulate(found)]


def costs_file(bundle: Path, engine: str, device: str) -> Path:
    return bundle / COSTS / f"{engine}-{device.replace(':', '-')}.json"


def refuse_unwritable(bundle: Bundle) -> None:
    """Refuse a bundle that cannot keep costs, before they are measured."""
    folder = bundle.path / COSTS
    place = folder if folder.exists() else bundle.path
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        raise BundleError(f"{place} takes no files, and costs are kept there; give access, or copy the bundle")


def read_costs(bundle: Bundle, engine: str, device: str) -> Costs | None:
    """Read the bundle's costs; return None if there are none, or if another machine or other graphs were measured."""
    path = costs_file(bundle.path, engine, device)
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if fields.pop("format") != FORMAT:
            return None
        fields = {BEFORE_TREES.get(name, name): value for name, value in fields.items()}
        for name in ("round_ms", "beside_ms"):
            fields[name] = {drafter: tuple(map(tuple, table)) for drafter, table in fields.get(name, {}).items()}
        fields["beside_tokens"] = {name: tuple(all) for name, all in fields.get("beside_tokens", {}).items()}
        fields["reading_ms"] = {name: tuple(parts) for name, parts in fields.get("reading_ms", {}).items()}
        for name in ("batches", "draft_lengths", "beside"):
            fields[name] = tuple(fields.get(name, ()))
        costs = Costs(**fields)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        mend = TUNE.format(bundle=bundle.path, engine=engine.replace("+", " --draft-engine "), device=device)
        raise BundleError(f"{path} is not a table of costs ({error}); run {mend}") from error
    here = costs.machine == machine_name(device) and costs.models == model_identities(bundle)
    return costs if here else None


def require_costs(costs: Costs | None, drafter: str | None) -> None:
    """Refuse draft length auto where the costs of a drafter are not known, or those of any if it is not named yet."""
    if drafter == NONE:
        return
    if costs is None:
        raise RequestError("draft_length auto needs to know what rounds cost here; run trt-spec tune, or give a number")
    if drafter not in (*costs.acceptance, MIXED, None):
        raise RequestError(
            f"draft_length auto knows the costs of drafter {' and '.join(costs.acceptance)} only, not of {drafter}; "
            "run trt-spec tune again, or give a number"
        )


def model_identities(bundle: Bundle) -> dict[str, str]:
    return {name: graph_identity(bundle.path, name) for name in bundle.models}


def machine_name(device: str) -> str:
    """Name the GPU, or the processor and how many of its cores this process may use."""
    if device.startswith("cuda"):
        import torch

        return str(torch.cuda.get_device_name(device))
    return f"{processor_name()}, {usable_cores(os.getpid())} cores"


def processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
