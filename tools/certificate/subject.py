"""What is certified: a bundle in one engine on one device; and what a check has found about it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tokenizers import Tokenizer

from ...engines import ENGINES, Bundle, engines_of
from ...runtime import Decoder, EntropyRule
from ...runtime.drafters import DRAFTERS
from ...runtime.lengths.drafting import AUTO, MIXED, DraftLength
from ..measuring.shipped_prompts import PYTHON_PROMPTS

# How far the logits of two shapes of the same computation may lie apart. float32 keeps 24 bits, of which a hundred
# roundings of activations use up a few. float16 keeps 11, and bfloat16 8: a logit of 10 is a multiple of 1/16 as it is.
# An engine that multiplies quantised weights rounds activations to 8 bits as well, and where a last one flips all that
# follows moves. Of the last two, 0.2 was measured. A wrong cache entry moves logits by what they are.
ROUNDING = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 4e-1}
QUANTISED_ROUNDING = 5e-1

Progress = Callable[[str, float, float], None]  # what is tried now; so much of the check is done, of so much


@dataclass(frozen=True)
class Finding:
    """What one case of a check came to."""

    check: str
    case: str
    passed: bool | None  # None: not judged
    detail: str
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Subject:
    bundle: Bundle
    engine: str
    device: str
    batch: int  # the most rows decoded together

    def open(self, max_batch: int | None = None, *, capture: bool = True, prefix_bytes: int | None = None) -> Decoder:
        batch = max_batch or self.batch
        return Decoder.open(self.bundle, self.engine, self.device, batch, capture=capture, prefix_bytes=prefix_bytes)

    def in_engine(self, engine: str) -> "Subject":
        return replace(self, engine=engine)

    def room(self, new_tokens: int) -> int:
        """So many new tokens, or half of what a short bundle holds."""
        return min(new_tokens, self.bundle.max_length // 2)

    def prompts(self, count: int | None = None) -> list[tuple[int, ...]]:
        """The first so many that are shipped, in the bundle's tokens, each at most half of what it holds."""
        tokenizer = Tokenizer.from_file(str(self.bundle.tokenizer_file))
        encoded = [tokenizer.encode(text).ids or [0] for text in PYTHON_PROMPTS[:count]]
        return [tuple(ids[-(self.bundle.max_length // 2) :]) for ids in encoded]

    @property
    def rounding(self) -> float:
        """The most that two shapes of the target may differ by in a logit."""
        target = self.bundle.target
        allowed = ROUNDING[ENGINES[engines_of(self.engine)[0]].computes_in or target.contract.dtype]
        return allowed if target.weights == "none" else max(allowed, QUANTISED_ROUNDING)


def draft_lengths(decoder: Decoder) -> list[int]:
    """1, 2, 4, 8 and the longest, where the engine can verify so many."""
    longest = decoder.longest_draft
    return sorted({k for k in (1, 2, 4, 8, longest) if 1 <= k <= longest})


def controllers(decoder: Decoder) -> list[tuple[str, DraftLength]]:
    """Drafter and draft length where a rule chooses, for all rules that can be followed here."""
    longest = decoder.longest_draft
    rule = EntropyRule(shortest=min(1, longest), longest=min(8, longest), stop_above=0.9)
    uncertain = ("random",)  # always, so that it would never propose
    by_entropy: list[tuple[str, DraftLength]] = [
        (name, rule) for name in decoder.drafters if DRAFTERS[name].samples and name not in uncertain
    ]
    measured = [name for name in decoder.drafters if decoder.default_draft_length(name) == AUTO]
    return by_entropy + [(name, AUTO) for name in (*measured, *([MIXED] if measured else []))]


def spelled(draft_length: DraftLength) -> str:
    return "K by entropy" if isinstance(draft_length, EntropyRule) else f"K {draft_length}"
