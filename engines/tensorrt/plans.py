"""The sidecar of a TensorRT plan describes it and lists everything that it depends on."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..bundle import ADAPTED, GRAPH, PLANS, shard_folder
from ..contract import MOST_PENDING, MOST_SLOTS
from ..errors import EngineError

FORMAT = 3

Ranges = tuple[tuple[str, int, int], ...]  # by symbol the smallest and the largest size


@dataclass(frozen=True)
class PlanKey:
    """Everything that a plan depends on; its files are named after it."""

    model: str  # its name in the bundle
    graph: str  # identity of its graph and weights
    engine: str
    version: str  # of the library that compiled it
    compute_capability: str
    width: int  # tokens of a call
    rows: int  # for which it gives logits
    batch: tuple[int, int]  # smallest and largest
    capacity: int  # of the cache
    workspace: int | None = None  # bytes the compiler may plan with
    unfused_attention: bool = False
    source: int = 0  # entries of a source, whatever its length, where there is one
    ranges: Ranges = ()  # of sizes beside the batch that may differ from call to call
    shard: int = 0  # of the shards of a model

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "PlanKey":
        ranges = tuple((str(name), int(least), int(most)) for name, least, most in fields["ranges"])
        return cls(**fields | {"batch": tuple(fields["batch"]), "ranges": ranges})

    @property
    def adapted(self) -> bool:
        """Whether it is of the graph that has room for adapters."""
        return any(name == "columns" for name, _, _ in self.ranges)

    def spans(self, other: "PlanKey") -> bool:
        """Whether it takes all batches, and all of the sizes that may differ, that another takes."""
        own = {name: (least, most) for name, least, most in (("batch", *self.batch), *self.ranges)}
        theirs = [each for each in (("batch", *other.batch), *other.ranges) if each[0] in own]
        return all(own[name][0] <= least and most <= own[name][1] for name, least, most in theirs)

    def covers(self, other: "PlanKey") -> bool:
        """Whether it runs all steps that one of these sizes runs."""
        return self.spans(other) and other.width <= self.width and other.rows <= self.rows

    @property
    def folder(self) -> Path:
        """The folder of its graph below the bundle."""
        return shard_folder(Path(self.model), self.shard)

    @property
    def file(self) -> str:
        """The name of its graph's file."""
        return f"{ADAPTED}{GRAPH}" if self.adapted else GRAPH

    @property
    def free(self) -> dict[str, tuple[int, int]]:
        """The smallest and the largest size of each symbol whose size may differ from call to call."""
        return {"batch": self.batch} | {name: (least, most) for name, least, most in self.ranges if least < most}

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the graph's symbols, except those that may differ."""
        fixed = {"pending": MOST_PENDING, "slots": MOST_SLOTS, "source": self.source}  # where there is what has them
        if self.width:
            fixed["entries"] = self.width * self.batch[1]  # of images, of which a token names one
        fixed |= {name: least for name, least, most in self.ranges if least == most}
        return {"width": self.width, "tail": self.width, "rows": self.rows, "capacity": self.capacity} | fixed

    @property
    def path(self) -> Path:
        """The plan's path below the bundle; its sidecar has the same name and the suffix .json."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return Path(PLANS, f"{self.engine}-{self.compute_capability}", f"{self.model}-{self.width}-{digest[:12]}.plan")


@dataclass(frozen=True)
class CompiledPlan:
    """The content of a plan's sidecar."""

    key: PlanKey
    role: str
    bytes: int
    sha256: str
    build_seconds: float
    made_by: dict[str, str]
    inputs: list[str]
    outputs: list[str]
    aliases: dict[str, str]  # each output that is bound to the memory of an input

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"


def read_plan(sidecar: Path) -> CompiledPlan:
    """Read a sidecar; refuse it if it or its plan is damaged, or if the plan is gone."""
    plan = sidecar.with_suffix(".plan")
    try:
        fields: dict[str, Any] = json.loads(sidecar.read_text(encoding="utf-8"))
        if fields.pop("format") != FORMAT:
            raise ValueError("another format")
        found = CompiledPlan(key=PlanKey.from_json(fields.pop("key")), **fields)
        if plan.name != found.key.path.name:
            raise ValueError(f"it describes {found.key.path.name}")
        if plan.stat().st_size != found.bytes:
            raise ValueError(f"{plan.name} has {plan.stat().st_size} bytes, it says {found.bytes}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise EngineError(f"{sidecar} does not describe a plan ({error}); delete it and run trt-spec build") from error
    return found
