"""How often a target would accept what a draft with tokens of its own proposes: by tokens that both have, or by text.

At some places of a text the draft reads all before them in its own tokens, and says what comes next in either way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checking.quality import overlap
from .common import NEVER, CommonTokens

PLACES = 24  # of the text, spread over it
MOST_WRITTEN = 8  # tokens that the draft writes for one of the target's
BROKEN = "\ufffd"  # stands for bytes that are no character
COMMON, TEXT = WAYS = ("common", "text")  # the drafters that propose so
Reads = Callable[[list[int]], Tensor]  # the logits [V] of a draft after its tokens


@dataclass(frozen=True)
class BothWays:
    """The target's logits [P, V] at some places, what the draft proposes by common tokens, and by text."""

    target: Tensor
    common: Tensor  # [P, V] logits of the target's tokens
    text: Tensor  # [P] tokens
    tokens: float  # of the draft's, for each of the target's

    def said(self, drafter: str) -> Tensor:
        """Return the logits [P, V] of what is proposed."""
        if drafter == COMMON:
            return self.common
        return torch.full_like(self.target, NEVER).scatter_(1, self.text[:, None], 0.0)

    def by_temperature(self, drafter: str, temperatures: Sequence[float]) -> dict[str, float]:
        return {f"{t:g}": overlap(self.target, self.said(drafter), t) for t in temperatures}

    def better(self, temperatures: Sequence[float]) -> str:
        """Return by which drafter more is accepted over these temperatures."""
        return max(WAYS, key=lambda way: sum(self.by_temperature(way, temperatures).values()))


def compare(
    tokens: Sequence[int], logits: Tensor, ours: Any, own: Any, common: CommonTokens, reads: Reads
) -> BothWays | None:
    """Compare at places of a text, whose target's logits [L, V] are known; None if it has no place to compare at.

    `ours` and `own` are the tokenizers of target and draft.
    """
    places, distributions, texts, counts = list[int](), list[Tensor](), list[int](), list[float]()
    for place in range(0, len(tokens), max(1, len(tokens) // PLACES)):
        text = ours.decode(tokens[: place + 1], skip_special_tokens=True)
        context = [*common.opening, *own.encode(text, add_special_tokens=False).ids]
        if text.endswith(BROKEN) or not context:
            continue
        distribution = reads(context)
        said = _said(text, context, distribution, ours, own, reads)
        if said is not None:
            places.append(place)
            texts.append(said)
            distributions.append(common.laid(distribution, logits.shape[1]))
            counts.append(len(context) / (place + 1))
    if not places:
        return None
    return BothWays(logits[places].float(), torch.stack(distributions), torch.tensor(texts), sum(counts) / len(counts))


def in_words(name: str, common: CommonTokens, size: int, acceptance: dict[str, dict[str, float]], drafter: str) -> str:
    """Say what a draft has in common with a target of `size` tokens, and how often it is accepted in either way."""
    known = f"{len(common.target):,} of the target's {size:,}"
    said = f"{name} has {common.vocab_size:,} tokens of its own, which can say {known}"
    for way, found in acceptance.items():
        shares = ", ".join(f"{share:.2f} at temperature {t}" for t, share in found.items())
        said += f"; drafter {way} would be accepted {shares}"
    return f"{said}; drafter {drafter} is the default"


def _said(text: str, context: list[int], distribution: Tensor, ours: Any, own: Any, reads: Reads) -> int | None:
    """Return the first token of the target in what the draft writes greedily."""
    before, written = own.decode(context, skip_special_tokens=False), list[int]()
    read = ours.encode(text, add_special_tokens=False).ids
    found: list[int] = []
    for _ in range(MOST_WRITTEN):
        written.append(int(distribution.argmax()))
        said = own.decode(context + written, skip_special_tokens=False)[len(before) :].rstrip(BROKEN)
        both = ours.encode(text + said, add_special_tokens=False).ids
        alone = both[: len(read)] != read
        found = ours.encode(said, add_special_tokens=False).ids if alone else both[len(read) :]
        if len(found) > 1:
            break
        distribution = reads(context + written)
    return found[0] if found else None
