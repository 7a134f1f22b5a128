"""What is certified: a bundle in one engine on one device; and what a check has found about it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tokenizers import Tokenizer

from ...engines import ENGINES, Bundle, engines_of
from ...runtime import CombLength, Decoder, EntropyRule, SamplingParams
from ...runtime.drafters import DRAFTERS
from ...runtime.lengths.drafting import AUTO, MIXED, DraftLength
from ...runtime.sampling.filters import FILTERS
from ..measuring.shipped_prompts import PYTHON_PROMPTS

# How far the logits of two shapes of the same computation may lie apart. float32 keeps 24 bits, of which a hundred
# roundings of activations use up a few. float16 keeps 11, and bfloat16 8: a logit of 10 is a multiple of 1/16 as it is.
# An engine that multiplies quantised weights rounds activations to 8 bits as well, and where a last one flips all that
# follows moves. Of the last two, 0.2 was measured. A wrong cache entry moves logits by what they are.
ROUNDING = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 4e-1}
QUANTISED_ROUNDING = 5e-1

# Siblings beside one token, beside each that may have some, fewer than that, and many beside a long line.
COMBS = (CombLength(1, 3), CombLength(2, 6), CombLength(3, 3), CombLength(6, 10))

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


def combs(decoder: Decoder, drafter: str) -> list[CombLength]:
    """Those that the drafter can hang siblings in, and the engine can verify."""
    engine = decoder.target.engine
    if not (engine.takes_trees and drafter in DRAFTERS and DRAFTERS[drafter].samples):
        return []
    return [one for one in COMBS if one.length <= decoder.longest_draft and width(one, 0) <= engine.verify_width]


def shapes(decoder: Decoder, drafter: str) -> list[DraftLength]:
    """All draft lengths that are tried of a drafter, combs among the lines."""
    lines, hung = draft_lengths(decoder), combs(decoder, drafter)
    each = [shape for pair in zip(hung, lines, strict=False) for shape in pair]
    return [*each, *hung[len(lines) :], *lines[len(hung) :]]


def takes_siblings(params: SamplingParams) -> bool:
    """Whether a request can be given a comb."""
    return not params.lenient and not any(one.reads_ahead and one.active(params) for one in FILTERS)


def width(draft_length: DraftLength, otherwise: int) -> int:
    """How many tokens a round verifies; `otherwise` where a rule chooses."""
    if isinstance(draft_length, CombLength):
        return draft_length.length + draft_length.siblings + 1
    return draft_length + 1 if isinstance(draft_length, int) else otherwise


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
