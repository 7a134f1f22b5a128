"""Check that target and drafts agree before any weight is read: on tokens, special ids, the longest sequence."""

from ...engines import PairError
from .checkpoint import Checkpoint
from .finding import refuse_length
from .vocabulary import Vocabulary

FEW = 64  # tokens at the end that one of two tokenizers may have more, or a tenth of them


def difference(target: Vocabulary, draft: Vocabulary) -> str | None:
    """Say where token maps differ but at their ends; None if the ids of both mean the same.

    Padded embeddings do not matter: only the ids that have a token are compared. What one of them has behind the
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
