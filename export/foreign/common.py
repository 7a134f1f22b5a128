"""Which tokens a target and a draft have in common, found by what they stand for and never by their numbers."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...engines.bundle import OwnTokens
from ..checkpoints.vocabulary import Vocabulary
from .spelling import spelling

NEVER = -1e30  # logit of a token that is never said


@dataclass(frozen=True)
class CommonTokens:
    """Token i of `own` means what token i of `target` means: the same bytes, or that a text begins or ends."""

    target: list[int]
    own: list[int]
    roles: dict[int, int]  # special tokens of the target, and which of the draft mean the same
    opening: tuple[int, ...]  # what the draft's texts begin with
    vocab_size: int  # of the draft

    @property
    def tables(self) -> dict[str, np.ndarray]:
        return {"target_ids": np.array(self.target, np.int64), "own_ids": np.array(self.own, np.int64)}

    def laid(self, logits: Tensor, size: int) -> Tensor:
        """Lay the draft's logits [V] on the target's tokens."""
        return torch.full((size,), NEVER).index_copy_(0, torch.tensor(self.target), logits[self.own])

    def entry(self, drafter: str, acceptance: dict[str, dict[str, float]]) -> OwnTokens:
        roles = tuple(sorted(self.roles.items()))
        return OwnTokens(self.vocab_size, len(self.target), drafter, self.opening, roles, acceptance)


def common_tokens(target: Vocabulary, draft: Vocabulary) -> CommonTokens:
    """Match by bytes, and special tokens by name or by what they are for; of several with the same bytes take the one
    that the tokenizer itself writes."""
    ours, theirs = _by_bytes(target.tokenizer), _by_bytes(draft.tokenizer)
    text = {ours[spelled]: theirs[spelled] for spelled in ours.keys() & theirs.keys()}
    roles = _roles(target, draft)
    pairs = sorted((text | roles).items())
    opening = [token for token in draft.tokenizer.encode("").ids if token not in draft.eos_token_ids]
    return CommonTokens(
        [ours for ours, _ in pairs], [own for _, own in pairs], roles, tuple(opening), draft.entry().vocab_size
    )


def _by_bytes(tokenizer: Any) -> dict[bytes, int]:
    alike = defaultdict[bytes, list[int]](list)
    for index, spelled in sorted(spelling(tokenizer).items()):
        alike[spelled].append(index)
    return {spelled: _written(tokenizer, spelled, ids) for spelled, ids in alike.items()}


def _written(tokenizer: Any, spelled: bytes, ids: list[int]) -> int:
    """Return which of some tokens with the same bytes the tokenizer writes, else the first."""
    if len(ids) > 1:
        written = tokenizer.encode(spelled.decode(errors="replace"), add_special_tokens=False).ids
        return written[-1] if written[-1:] and written[-1] in ids else ids[0]
    return ids[0]


def _roles(target: Vocabulary, draft: Vocabulary) -> dict[int, int]:
    roles = {}
    special = _special(draft.tokenizer)
    for token, index in _special(target.tokenizer).items():
        if token in special:
            roles[index] = special[token]
    if target.bos_token_id is not None and draft.bos_token_id is not None:
        roles[target.bos_token_id] = draft.bos_token_id
    for index in target.eos_token_ids if draft.eos_token_ids else ():
        roles.setdefault(index, draft.eos_token_ids[0])
    return roles


def _special(tokenizer: Any) -> dict[str, int]:
    return {token.content: index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
