"""Check that target and drafts agree before any weight is read: on tokens, special ids, the longest sequence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...engines import Contract, ExportError, PairError
from ...engines.bundle import DRAFTS, FOREIGN, TARGET
from .checkpoint import Checkpoint, open_checkpoint
from .finding import refuse_length
from .vocabulary import Vocabulary, read_vocabulary

FEW = 64  # tokens at the end that one of two tokenizers may have more, or a tenth of them
SPREAD = 2  # tokens that a draft with its own may have for each of the target's


@dataclass(frozen=True)
class Agreed:
    """A target and its drafts, by role; their weights are still unread."""

    checkpoints: Mapping[str, Checkpoint]
    vocabularies: Mapping[str, Vocabulary]
    length: int  # of the longest text
    notes: list[str]

    def contract(self, role: str, dtype: str) -> Contract:
        shape, vocab_size = self.checkpoints[role].shape, self.vocabularies[TARGET].entry().vocab_size
        if role == FOREIGN:
            return shape.contract(min(shape.positions, SPREAD * self.length), dtype)
        if shape.vocab_size < vocab_size:  # a draft that lacks the target's last tokens
            shape = replace(shape, vocab_size=vocab_size)
        return shape.contract(self.length, dtype)


def agree(
    names: Sequence[str | Path], adapters: Sequence[str | Path | None], heads: Sequence[str], max_length: int | None
) -> Agreed:
    """Open a target and its drafts with an adapter each, and refuse what does not fit; heads are only named."""
    opened = [open_checkpoint(*each) for each in zip(names, adapters, strict=True)]
    read = [read_vocabulary(checkpoint) for checkpoint in opened]
    roles = _roles(opened, read)
    checkpoints, vocabularies = dict(zip(roles, opened, strict=True)), dict(zip(roles, read, strict=True))
    refuse_unlike_sources(checkpoints, heads)
    length = agreed_length([checkpoint for role, checkpoint in checkpoints.items() if role != FOREIGN], max_length)
    ours = vocabularies[TARGET]
    notes = [note for checkpoint in opened for note in checkpoint.notes]
    notes += [ours.note] if ours.note else []
    notes += [note for role in roles[1:] if role != FOREIGN for note in refuse_unequal(ours, vocabularies[role])]
    return Agreed(checkpoints, vocabularies, length, notes)


def difference(target: Vocabulary, draft: Vocabulary) -> str | None:
    """Say where token maps differ but at their ends; None if the ids of both mean the same.

    Padded embeddings do not matter: only the ids that have a token are compared. What one of them has after the
    other's last token is never proposed.
    """
    ends = max(target.tokens), max(draft.tokens)
    for index in range(min(ends) + 1):
        ours, theirs = target.tokens.get(index), draft.tokens.get(index)
        if ours != theirs:
            return f"id {index} is {_token(ours, target, draft)} but {_token(theirs, draft, target)}"
    if max(ends) - min(ends) > max(FEW, min(ends) // 10):
        return f"{target.name} has {ends[0] + 1:,} tokens, {draft.name} {ends[1] + 1:,}"
    return None


def reads_alone(target: Checkpoint, draft: Checkpoint) -> bool:
    """Whether a draft can read texts in tokens of its own: what it reads must be text, and all its states tokens'."""
    return target.shape.source is None and draft.shape.source is None and not draft.shape.recurrent


def refuse_unequal(target: Vocabulary, draft: Vocabulary) -> list[str]:
    """Refuse token maps that differ; returns what is different but harmless.

    Where a text begins and ends is the target's to say.
    """
    if differs := difference(target, draft):
        raise PairError(
            f"the tokenizers of target and draft differ: {differs}; choose a draft with the target's tokenizer"
        )
    ends = max(target.tokens), max(draft.tokens)
    notes = []
    if ends[0] != ends[1]:
        more, less = (target, draft) if ends[0] > ends[1] else (draft, target)
        notes.append(f"{more.name} has {max(ends) - min(ends)} tokens that {less.name} lacks; no draft proposes them")
    if target.bos_token_id != draft.bos_token_id:
        notes.append(f"texts begin with {target.bos_token_id}, as the target's do; the draft's: {draft.bos_token_id}")
    if set(target.eos_token_ids) != set(draft.eos_token_ids):
        own, other = sorted(target.eos_token_ids), sorted(draft.eos_token_ids)
        notes.append(f"texts end with {own}, as the target's do; the draft's: {other}")
    if draft.chat_template not in (None, target.chat_template):
        notes.append("the chat templates differ; the target's is used")
    return notes


def agreed_length(checkpoints: list[Checkpoint], asked: int | None) -> int:
    """Choose the longest sequence of the bundle: what all models have positions for, or less if asked."""
    shortest = min(checkpoints, key=lambda checkpoint: checkpoint.shape.positions)
    positions = shortest.shape.positions
    if asked is None:
        asked = positions
    refuse_length(shortest.name, positions, asked, f" ({shortest.shape.ends})" if shortest.shape.ends else "")
    return asked


def _token(token: str | None, own: Vocabulary, other: Vocabulary) -> str:
    """Name a token of one tokenizer, and the id it has in the other."""
    if token is None:
        return f"no token in {own.name}"
    found = other.tokenizer.token_to_id(token)
    elsewhere = f"not in {other.name}" if found is None else f"id {found} in {other.name}"
    return f"{token!r} in {own.name} ({elsewhere})"


def _roles(checkpoints: Sequence[Checkpoint], vocabularies: Sequence[Vocabulary]) -> list[str]:
    """Name the target and its drafts, of which one may have tokens of its own."""
    foreign = [
        number > 0
        and difference(vocabularies[0], vocabulary) is not None
        and reads_alone(checkpoints[0], checkpoints[number])
        for number, vocabulary in enumerate(vocabularies)
    ]
    if sum(foreign) > 1:
        names = " and ".join(one.name for one, own in zip(vocabularies, foreign, strict=True) if own)
        raise PairError(f"{names} both have other tokens than the target {vocabularies[0].name}; name one of them")
    named = iter((TARGET, *DRAFTS))
    return [FOREIGN if own else next(named) for own in foreign]


def refuse_unlike_sources(checkpoints: Mapping[str, Checkpoint], heads: Sequence[str]) -> None:
    """Refuse a draft that needs another source than its target has, and heads of a target that has one."""
    target = checkpoints[TARGET]
    source = target.shape.source
    if source is not None and heads:
        raise ExportError(
            f"{heads[0]} is a head, and the target {target.name} has an encoder, where this version gives a "
            "head nothing to read; leave it out"
        )
    for role, draft in checkpoints.items():
        theirs = draft.shape.source
        if (
            role != TARGET
            and theirs is not None
            and (source is None or (source.sound is None) != (theirs.sound is None))
        ):
            ours = "no source" if source is None else "sound" if source.sound else "text"
            raise ExportError(
                f"the draft {draft.name} reads {'sound' if theirs.sound else 'text'} as its source, the target "
                f"{target.name} {ours}; choose a draft that reads what the target reads, or a decoder alone"
            )
