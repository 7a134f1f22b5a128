"""The kinds of heads: how each is recognised, read and traced; to add one, write a file and add a row to the table."""

from collections.abc import Sequence
from pathlib import Path

from ...engines import ExportError
from ..checkpoints.checkpoint import find_config
from ..checkpoints.weight_files import require_weights
from .check_head import check_head
from .dflash import DFlashKind
from .dspark import DSparkKind
from .eagle3 import Eagle3Kind, PEagleKind
from .files import HeadFiles, shapes_of
from .heads import HeadCheckpoint, HeadKind, LoadedHead
from .joining import Joined, Joining
from .look_aheads import PASS, LookAheads, open_look_aheads
from .mtp import MtpKind, MtpOfTarget, lives_in
from .parallel import BlockwiseKind, MedusaKind

HEADS: dict[str, HeadKind] = {
    kind.name: kind
    for kind in (
        PEagleKind(),
        Eagle3Kind(),
        MtpKind(),
        DFlashKind(),
        DSparkKind(),
        MedusaKind(),
        BlockwiseKind(),
    )
}
IN_TARGETS: tuple[HeadKind, ...] = (MtpOfTarget(),)  # those that may be in a checkpoint of their target


def open_head(name: str | Path, target: str | Path | None = None) -> HeadCheckpoint | None:
    """Read all of a head but its weights; None for a model of its own.

    A draft that is named as its target is the head in the target's checkpoint, if that has one.
    """
    found = find_config(str(name))
    if found is None:
        return None
    path, fields = found
    if (named := fields.get("speculators_model_type")) is not None and str(named) not in HEADS:
        raise ExportError(
            f"{name} is a head of the kind {named!r}, which this version cannot run; it runs {', '.join(HEADS)}"
        )
    shapes = shapes_of(str(name), path)
    kind = next(
        (
            kind
            for kind in (IN_TARGETS if lives_in(name, target) else HEADS.values())
            if kind.recognises(fields, shapes)
        ),
        None,
    )
    if kind is None:
        return None
    require_weights(str(name), path)
    return HeadCheckpoint(str(name), path, fields, kind)


def open_any(name: str | Path, target: str | Path | None = None) -> tuple[str, HeadFiles] | None:
    """Read all but the weights of a head of any kind, which is said, too; None for a model of its own."""
    if (found := open_look_aheads(name)) is not None:
        return PASS, found
    head = open_head(name, target)
    return None if head is None else (head.kind.name, head)


def sorted_out(target: str | Path, drafts: Sequence[str | Path]) -> tuple[list[str | Path], Joining]:
    """Sort drafts: models of their own, heads, of which a bundle holds one of each kind, and look-aheads."""
    if drafts:
        find_config(str(target))  # which is refused before any weights of a draft are brought
    models, heads, look_aheads = list[str | Path](), dict[str, HeadCheckpoint](), list[LookAheads]()
    for draft in drafts:
        if (found := open_look_aheads(draft)) is not None:
            look_aheads.append(found)
            continue
        head = open_head(draft, target)
        if head is None:
            models.append(draft)
        elif head.kind.name in heads:
            raise ExportError(f"{head.name} and {heads[head.kind.name].name} are both {head.kind.name} heads; name one")
        else:
            heads[head.kind.name] = head
    if len(look_aheads) > 1:
        raise ExportError(f"{look_aheads[1].name} and {look_aheads[0].name} are both look-aheads; name one")
    return models, Joining(heads, next(iter(look_aheads), None))


__all__ = [
    "HEADS",
    "PASS",
    "HeadCheckpoint",
    "HeadKind",
    "Joined",
    "Joining",
    "LoadedHead",
    "LookAheads",
    "check_head",
    "open_any",
    "open_head",
    "open_look_aheads",
    "sorted_out",
]
