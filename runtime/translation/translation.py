"""Map the tokens that a draft with its own vocabulary shares with its target, as export has found them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from tokenizers import Tokenizer
from torch import Tensor

from ...engines import Bundle, BundleError
from ...engines.bundle import TOKENIZER, read_tables

PAIRS = ("target_ids", "own_ids")  # the arrays of a bundle that hold them


@dataclass(frozen=True)
class Translation:
    """Token i of `own_ids` [C] and token i of `target_ids` [C] are the same text, or end a text alike."""

    target: Tokenizer
    own: Tokenizer
    target_ids: Tensor
    own_ids: Tensor
    vocab_size: int  # of the draft
    opening: tuple[int, ...]  # what the draft's texts begin with
    roles: Mapping[int, int]  # special tokens of the target, and which of the draft mean the same
    special: frozenset[int]  # all that are in the draft's vocabulary

    @classmethod
    def read(cls, bundle: Bundle, target: Tokenizer, device: str) -> Self:
        name = bundle.foreign
        assert name is not None, "the bundle has a draft with tokens of its own"
        tokens = bundle.models[name].tokens
        assert tokens is not None
        file = bundle.path / name / TOKENIZER
        try:
            own = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exceptions
            raise BundleError(f"{file} is not a tokenizer ({error}); export the bundle again") from error
        arrays = read_tables(bundle, name, PAIRS)
        pairs = [torch.from_numpy(arrays[key]).long() for key in PAIRS]
        sizes = bundle.tokenizer.vocab_size, tokens.vocab_size
        if not (len(pairs[0]) == len(pairs[1]) == tokens.common and all(map(_below, pairs, sizes))):
            raise BundleError(f"the tables of the {name} draft name tokens that there are not; export the bundle again")
        target_ids, own_ids = (ids.to(device) for ids in pairs)
        special = frozenset(index for index, token in own.get_added_tokens_decoder().items() if token.special)
        return cls(target, own, target_ids, own_ids, sizes[1], tokens.opening, dict(tokens.roles), special)


def _below(ids: Tensor, size: int) -> bool:
    return ids.dim() == 1 and bool(((ids >= 0) & (ids < size)).all())
