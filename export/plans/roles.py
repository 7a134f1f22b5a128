"""The plans that `build_plans` is asked for, and the roles that follow: a role is a shape of one model's graph."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...engines import (
    ENGINES,
    FOREIGN_WINDOW,
    MAX_DRAFT_LENGTH,
    SLACK,
    WIDEST_STEP,
    Contract,
    ExportError,
    Masks,
)
from ...engines.bundle import FOREIGN, TARGET, VISION

if TYPE_CHECKING:
    from ...engines.tensorrt import Ranges  # which needs torch

NO_HEADS: Mapping[str, Contract] = {}
NO_MASKS: Mapping[str, Masks] = {}
COMPILED = tuple(library.replace("_", "-") for library in ENGINES["tensorrt"].libraries)  # that compile plans
CAPABILITY = re.compile(r"[1-9]\d?\.\d")


@dataclass(frozen=True)
class Role:
    """A shape of one model's graph."""

    name: str
    model: str
    width: int
    rows: int
    batch: tuple[int, int]
    ranges: "Ranges" = ()  # of sizes beside the batch that may differ from call to call
    shard: int = 0


SEE = Role("see", VISION, 0, 0, (1, 1))  # of images of the sizes that its ranges say


@dataclass(frozen=True)
class BuildOptions:
    """The plans to compile, and the GPUs they are for."""

    engine: str
    compute_capabilities: Sequence[str] = ()  # empty: that of the GPU here
    batch: tuple[int, int] = (1, 8)
    draft_length: int = 4
    siblings: int = 0  # beside a line: siblings, branches of trees, or tokens of further lines
    draft_trees: bool = False  # drafts read whole trees, too
    prefill_width: int = 128  # 0: the verify plan prefills
    workspace: int | None = None  # bytes
    unfused_attention: bool = False  # allowed also where there is a fused one, in half precision

    def __post_init__(self) -> None:
        if self.engine not in COMPILED:
            raise ExportError(f"there is no engine {self.engine!r} to build for, expected {' or '.join(COMPILED)}")
        if not 1 <= self.batch[0] <= self.batch[1]:
            raise ExportError(f"batch is {self.batch[0]}..{self.batch[1]}, expected two numbers from 1 on, in order")
        if not 0 <= self.draft_length <= MAX_DRAFT_LENGTH:
            raise ExportError(f"draft length is {self.draft_length}, expected 0 to {MAX_DRAFT_LENGTH}")
        if not 0 <= self.siblings < WIDEST_STEP - self.draft_length:
            raise ExportError(f"siblings is {self.siblings}, expected 0 to {WIDEST_STEP - 1 - self.draft_length}")
        if self.prefill_width and not self.verify_width < self.prefill_width <= SLACK:
            raise ExportError(
                f"prefill width is {self.prefill_width}, expected {self.verify_width + 1} to {SLACK}, or 0 for none"
            )
        for capability in self.compute_capabilities:
            if not CAPABILITY.fullmatch(capability):
                raise ExportError(f"compute capability is {capability!r}, expected one like 8.9")

    @property
    def verify_width(self) -> int:
        """The last committed token, and all that a round may propose."""
        return 1 + self.draft_length + self.siblings


def with_more_of_target(roles: Sequence[Role], target: Contract) -> list[Role]:
    """Add the roles of other graphs of the target: the one that has room for adapters, and those of further shards."""
    own, adapted = [one for one in roles if one.model == TARGET], list[Role]()
    if (room := target.adapters) is not None:
        columns = (("columns", room.rank, room.most * room.rank),)
        adapted = [replace(one, name=f"{one.name}, adapters", ranges=columns) for one in own]
    of_shards = [
        replace(one, name=f"{one.name}, shard {shard}", shard=shard)
        for shard in range(1, target.shards)
        for one in (*own, *adapted)
    ]
    return [*roles, *adapted, *of_shards]


def roles(
    options: BuildOptions,
    drafts: Sequence[str],
    heads: Mapping[str, Contract] = NO_HEADS,
    masks: Mapping[str, Masks] = NO_MASKS,
) -> list[Role]:
    """The target verifies, drafts decode after a first step of two tokens; all prefill, one row at a time.

    With `draft_trees` the drafts also run steps as wide as those that verify, which hold whatever a round proposes. The
    first step of a head reads all that a round may commit; heads that keep nothing speak all at once. So do drafts and
    heads that read masks, after all that a round may commit. A draft with tokens of its own reads several first, and no
    trees.
    """
    k, prefill, verify = options.draft_length, options.prefill_width, options.verify_width
    found = [Role("verify", "target", verify, verify, options.batch)]
    if prefill:
        found.append(Role("prefill", "target", prefill, 1, (1, 1)))
    if not k:
        return found
    first = {name: FOREIGN_WINDOW if name == FOREIGN else 2 for name in drafts}
    first |= {name: k + 1 for name, contract in heads.items() if contract.cache_names}
    for name, own in masks.items():
        found.append(Role("masks", name, k + 1 + own.reads(k), k, options.batch))
        if name in heads:
            first.pop(name)
            if prefill:
                found.append(Role("prefill", name, prefill, 1, (1, 1)))
    for draft, width in first.items():
        found += [Role("first", draft, width, 1, options.batch), Role("decode", draft, 1, 1, options.batch)]
        if options.draft_trees and draft != FOREIGN:
            found.append(Role("tree", draft, verify, verify, options.batch))
        if prefill:
            found.append(Role("prefill", draft, prefill, 1, (1, 1)))
    return found + [Role("decode", head, 1, k, options.batch) for head in heads if not heads[head].cache_names]
