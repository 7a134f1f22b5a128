"""The subject of a certificate: a bundle in one engine on one device; and what a check has found about it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ...engines import ENGINES, Bundle, engines_of
from ...runtime import Decoder, EntropyRule, SamplingParams
from ...runtime.acceptance.filters import FILTERS
from ...runtime.drafters import DRAFTERS
from ...runtime.state.asked import AUTO, BESIDE, MIXED, DraftLength
from ...runtime.state.shapes import MOST_LINES, Shape, comb, regular, tree
from ..example_sources import SourcedDecoder
from ..prompts.shipped import PYTHON_PROMPTS

# How far the logits of two shapes of the same computation may lie apart. float32 keeps 24 bits, of which a hundred
# roundings of activations use up a few. float16 keeps 11, and bfloat16 8: a logit of 10 is a multiple of 1/16 as it is.
# An engine that multiplies quantised weights rounds activations to 8 bits as well, and where a last one flips all that
# follows moves. 0.2 was measured for the last two. A wrong cache entry moves logits by what they are.
ROUNDING = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 4e-1}
QUANTISED_ROUNDING = 5e-1

# Siblings beside one token, beside each that may have some, fewer than that, and many beside a long line; trees where
# the draft expects most, short and long, and with so many children of each node.
COMBS_AND_TREES = (
    comb(1, 3),
    comb(2, 6),
    comb(3, 3),
    comb(6, 10),
    tree(3, 5),
    tree(6, 24),
    regular(2, 2),
    regular(3, 2, 1),
)

Choice = tuple[str, DraftLength]  # a drafter and its draft length
Progress = Callable[[str, float, float], None]  # what is tried now; so much of the check is done, of so much


@dataclass(frozen=True)
class Finding:
    """The outcome of one case of a check."""

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
    decoder: type[SourcedDecoder] = SourcedDecoder
    adapter: Path | None = None  # that the target has in all requests

    def open(self, max_batch: int | None = None, *, capture: bool = True, prefix_bytes: int | None = None) -> Decoder:
        batch = max_batch or self.batch
        kind = self.decoder if self.adapter is None else SourcedDecoder  # others may recall what has no adapter
        decoder = kind.open(self.bundle, self.engine, self.device, batch, capture=capture, prefix_bytes=prefix_bytes)
        if self.adapter is not None:
            decoder.adapter = self.adapter.resolve().name
            decoder.load_adapter(decoder.adapter, self.adapter)
        return decoder

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


def combs_and_trees(decoder: Decoder, drafter: str) -> list[Shape]:
    """Return the shapes that the drafter can grow, and the engine can verify beside any line, by any rule."""
    if not (decoder.target.engine.takes_trees and drafter in DRAFTERS and DRAFTERS[drafter].samples):
        return []
    longest = decoder.longest_draft
    room = decoder.largest_comb - longest
    able = [one for one in COMBS_AND_TREES if one.leaves or drafter in decoder.growing]
    return [one for one in able if one.length <= longest and one.beyond <= room]


def kinds(decoder: Decoder, drafter: str) -> list[list[DraftLength]]:
    """The lines, combs and trees that are tried of a drafter."""
    hung = combs_and_trees(decoder, drafter)
    combs, trees = ([one for one in hung if one.leaves == leaves] for leaves in (True, False))
    return [[*draft_lengths(decoder)], [*combs], [*trees]]


def several(decoder: Decoder) -> list[tuple[str, int]]:
    """Each source beside its neighbour and a second copy of that, and as many as can be, with K of all lengths."""
    if not decoder.target.engine.takes_trees:
        return []
    names = [name for name in decoder.drafters if DRAFTERS[name].beside_others]
    most = min(MOST_LINES, len(names), decoder.largest_comb // max(1, decoder.longest_draft))
    if most < 2:
        return []
    pairs = [
        BESIDE.join([one, other, *([other] if DRAFTERS[other].has_copies else [])][:most])
        for one, other in zip(names, [*names[1:], names[0]], strict=True)
    ]
    drafters = [*(pairs if len(names) > 2 else pairs[:1]), BESIDE.join(reversed(names[:most]))]
    lengths = draft_lengths(decoder)
    return [(drafter, lengths[i % len(lengths)]) for i, drafter in enumerate(drafters)]


def is_tree(drafter: str, draft_length: DraftLength) -> bool:
    """Whether a request that has it needs more than a line in a round."""
    return BESIDE in drafter or isinstance(draft_length, Shape)


def shapes(decoder: Decoder, drafter: str) -> list[Choice]:
    """All that is tried of a drafter: lines, combs, trees, and lines beside those of others, one after another."""
    lines = [(drafter, k) for k in draft_lengths(decoder)]
    hung = [(drafter, comb) for comb in combs_and_trees(decoder, drafter)]
    beside = [choice for choice in several(decoder) if choice[0].startswith(f"{drafter}{BESIDE}")]
    return [choice for each in zip_longest(hung, lines, beside) for choice in each if choice is not None]


def takes_trees(params: SamplingParams) -> bool:
    """Whether a request can be given more than a line."""
    return all(one.reads_trees or not one.reads_proposals for one in FILTERS if one.active(params))


def width(drafter: str, draft_length: DraftLength, otherwise: int) -> int:
    """How many tokens a round verifies; `otherwise` where a rule chooses."""
    if isinstance(draft_length, Shape):
        return draft_length.length + draft_length.beyond + 1
    return len(drafter.split(BESIDE)) * draft_length + 1 if isinstance(draft_length, int) else otherwise


def controllers(decoder: Decoder) -> list[tuple[str, DraftLength]]:
    """Drafter and draft length where a rule chooses, for all rules that can be followed here."""
    longest = decoder.longest_draft
    rule = EntropyRule(shortest=min(1, longest), longest=min(8, longest), stop_above=0.9)
    by_entropy: list[tuple[str, DraftLength]] = [
        (name, rule) for name in decoder.drafters if DRAFTERS[name].samples and not DRAFTERS[name].always_unsure
    ]
    measured = [name for name in decoder.drafters if decoder.default_draft_length(name) == AUTO]
    return by_entropy + [(name, AUTO) for name in (*measured, *([MIXED] if measured else []))]


def spelled(draft_length: DraftLength) -> str:
    return "K by entropy" if isinstance(draft_length, EntropyRule) else f"K {draft_length}"
