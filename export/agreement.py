"""What a target and its drafts must agree on, before any weight is read: tokens, special ids, the longest sequence."""

from ..engines import ExportError, PairError
from .checkpoint import Checkpoint
from .vocabulary import Vocabulary

SHORTEST_MAX_LENGTH = 32  # a bundle whose sequences are shorter cannot hold one round of the widest draft


def refuse_unequal(target: Vocabulary, draft: Vocabulary) -> list[str]:
    """Refuse different token maps or special ids; returns what is different but harmless.

    Padded embeddings do not matter: only the ids that have a token are compared.
    """
    for index in range(max(*target.tokens, *draft.tokens) + 1):
        ours, theirs = target.tokens.get(index), draft.tokens.get(index)
        if ours != theirs:
            raise PairError(
                f"the tokenizers of target and draft differ: id {index} is {_token(ours, target, draft)} but "
                f"{_token(theirs, draft, target)}; choose a draft with the target's tokenizer"
            )
    if target.bos_token_id != draft.bos_token_id:
        raise _special_ids("bos", target, draft, target.bos_token_id, draft.bos_token_id)
    if set(target.eos_token_ids) != set(draft.eos_token_ids):
        raise _special_ids("eos", target, draft, sorted(target.eos_token_ids), sorted(draft.eos_token_ids))
    if target.chat_template != draft.chat_template:
        return ["the chat templates differ; the target's is used"]
    return []


def agreed_length(checkpoints: list[Checkpoint], asked: int | None) -> int:
    """Choose the longest sequence of the bundle: what all models have positions for, or less if asked."""
    shortest = min(checkpoints, key=lambda checkpoint: checkpoint.shape.positions)
    positions = shortest.shape.positions
    if asked is None:
        asked = positions
    if asked > positions:
        raise ExportError(
            f"--max-length {asked} is {asked - positions} more than the {positions} positions of {shortest.name}; "
            f"ask for at most {positions}"
        )
    if asked < SHORTEST_MAX_LENGTH:
        raise ExportError(f"a maximum length of {asked} is too short, expected at least {SHORTEST_MAX_LENGTH}")
    return asked


def _special_ids(kind: str, target: Vocabulary, draft: Vocabulary, ours: object, theirs: object) -> PairError:
    return PairError(
        f"target and draft differ in their {kind} ids: {ours} in {target.name}, {theirs} in {draft.name}; "
        "make their generation_config.json agree"
    )


def _token(token: str | None, own: Vocabulary, other: Vocabulary) -> str:
    """Name a token of one tokenizer, and the id it has in the other."""
    if token is None:
        return f"no token in {own.name}"
    found = other.tokenizer.token_to_id(token)
    elsewhere = f"not in {other.name}" if found is None else f"id {found} in {other.name}"
    return f"{token!r} in {own.name} ({elsewhere})"
