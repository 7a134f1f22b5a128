"""Next-token probabilities counted from a text: the longest context seen decides, and shorter ones fill the rest.

A context gives a share to each token that followed it and leaves the rest to the context one token shorter, down to
single tokens and at last to all tokens equally. So every token has some probability, and no request can exclude all
that a draft may say. The contexts form a tree from the latest token backwards; a lookup walks from the shortest context
to the longest one seen.
"""

import io
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from ...engines import Bundle, BundleError
from ..state.needs import ngram_file

SUFFIX = ".npz"
REMEDY = "count it again with trt-spec ngram"


@dataclass(frozen=True)
class NGrams:
    """Entry i of `keys` stands for context i: the number of its parent × V + its first token.

    The parent is the context without its first token; parents are numbered from 1, and 0 is the empty context. The
    entries from `offsets[i]` to `offsets[i + 1]` say what followed context i.
    """

    single: Tensor  # [V] float32, probabilities after the empty context
    keys: Tensor  # [N] int64, ascending
    left: Tensor  # [N] float32, the share that a context leaves to the shorter one
    offsets: Tensor  # [N + 1] int64
    tokens: Tensor  # [E] int32, what followed
    shares: Tensor  # [E] float32
    longest: int  # tokens in the longest context
    widest: int  # the most tokens that followed one context

    @classmethod
    def of_arrays(cls, arrays: dict[str, np.ndarray], longest: int, device: str = "cpu") -> Self:
        tensors = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
        return cls(**tensors, longest=longest, widest=int(np.diff(arrays["offsets"]).max(initial=0)))

    def after(self, context: Tensor) -> Tensor:
        """Return probabilities [A, V] of what follows the tokens [A, longest]; -1 comes before the first token."""
        vocab_size = len(self.single)
        probabilities = self.single.repeat(len(context), 1)
        alive = torch.ones(len(context), dtype=torch.bool, device=context.device)
        found = context.new_full((len(context),), -1)
        column = torch.arange(self.widest, device=context.device)
        for back in range(1, self.longest + 1):
            token = context[:, -back]
            key = (found + 1) * vocab_size + token
            found = torch.searchsorted(self.keys, key).clamp_(max=len(self.keys) - 1)
            alive = alive & (token >= 0) & (self.keys[found] == key)
            entry = self.offsets[found][:, None] + column  # [A, widest]
            followed = alive[:, None] & (entry < self.offsets[found + 1][:, None])
            entry = entry.clamp_(max=len(self.tokens) - 1)
            probabilities = probabilities * torch.where(alive, self.left[found], 1.0)[:, None]
            probabilities.scatter_add_(1, self.tokens[entry].long(), torch.where(followed, self.shares[entry], 0.0))
        return probabilities


DTYPES = {
    "single": "float32",
    "keys": "int64",
    "left": "float32",
    "offsets": "int64",
    "tokens": "int32",
    "shares": "float32",
}


def to_bytes(arrays: dict[str, np.ndarray], longest: int) -> bytes:
    content = io.BytesIO()
    typed = {name: arrays[name].astype(dtype) for name, dtype in DTYPES.items()} | {"longest": np.array(longest)}
    np.savez(content, **typed)  # type: ignore[arg-type]  # numpy's names may be anything
    return content.getvalue()


def read_ngrams(bundle: Bundle, device: str) -> NGrams:
    """Read the table of a bundle that has one."""
    name = ngram_file(bundle)
    assert name is not None
    return read(bundle.path / name, bundle.tokenizer.vocab_size, device)


def read(file: Path, vocab_size: int, device: str = "cpu") -> NGrams:
    """Read a table; refuse one whose indices point outside it, or where a token has no probability."""
    try:
        with np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in DTYPES}
            longest = int(stored["longest"])
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise BundleError(f"{file} is not a table of n-grams ({error}); {REMEDY}") from error
    if arrays["single"].shape != (vocab_size,):
        raise BundleError(
            f"{file} counts a vocabulary of {arrays['single'].size} tokens, the bundle has {vocab_size}; {REMEDY}"
        )
    offsets, tokens = arrays["offsets"], arrays["tokens"]
    contexts, entries = len(arrays["keys"]), len(tokens)
    sound = (
        all(array.ndim == 1 and array.dtype == DTYPES[name] for name, array in arrays.items())
        and len(arrays["left"]) == contexts == len(offsets) - 1
        and len(arrays["shares"]) == entries
        and (longest > 0) == (contexts > 0) == (entries > 0)
        and offsets[0] == 0
        and offsets[-1] == entries
        and bool((np.diff(offsets) >= 0).all())
        and bool(((tokens >= 0) & (tokens < vocab_size)).all())
        and all(bool((arrays[name] > 0).all()) for name in ("single", "left", "shares"))
    )
    if not sound:
        raise BundleError(f"{file} is not a table of n-grams (its arrays do not fit together); {REMEDY}")
    return NGrams.of_arrays(arrays, longest, device)
