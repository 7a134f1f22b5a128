"""How the first tokens of a request are jointly distributed: exactly, from the target's own logits in float64.

The cells are the likely tokens and, after each prefix of them, the rest.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

import torch
from torch import Tensor

from ...runtime import SamplingParams
from ...runtime.grammars.compiler import Compiler
from ...runtime.state.asked import DraftLength
from .exact import scores
from .grammars import LETTERS, excluded
from .probe import Probe
from .subject import spelled, width

DEPTH = 3  # tokens of the joint
LIKELY = 0.01  # of the joint: what is less likely counts as the rest of its prefix
REST = -1
REMEMBERED_BYTES = 2**28
SETTINGS = {
    "T 0.5": SamplingParams(temperature=0.5),
    "T 0.7, top-p 0.9": SamplingParams(temperature=0.7, top_p=0.9),
    "T 1, top-k 6, min-p 0.05": SamplingParams(temperature=1.0, top_k=6, min_p=0.05),
    "T 0.6, penalties, bias": SamplingParams(
        temperature=0.6, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.5, logit_bias={1: 1.0}
    ),
    "T 0.6, grammar": SamplingParams(temperature=0.6, grammar=LETTERS),
}

Tokens = tuple[int, ...]
Logits = Callable[[Tokens, int], Tensor]  # [V] after a context whose last tokens are read in a step of this width


@dataclass(frozen=True)
class Case:
    settings: str
    rule: str
    drafter: str
    draft_length: DraftLength
    prompt: Tokens
    predicted: bool = False  # each request is given what the same seed has said without speculation

    @property
    def params(self) -> SamplingParams:
        settings = SETTINGS[self.settings]
        return replace(settings, rule=self.rule, max_new_tokens=DEPTH, ignore_eos=settings.grammar is None)

    def __str__(self) -> str:
        predicted = ", predicting its own output" if self.predicted else ""
        return f"{self.rule}, {self.settings}, {self.drafter}, {spelled(self.draft_length)}{predicted}"


@dataclass(frozen=True)
class Exact:
    """The probabilities of the cells, and how far shapes that round differently lie apart."""

    cells: dict[Hashable, float]
    divergence: float  # the larger Σ (p' − p)² / p of a shape p' against their mean p


def remembering(probe: Probe) -> Logits:
    """Cases that share a prompt share most of the contexts."""
    return lru_cache(REMEMBERED_BYTES // (4 * probe.model.vocab_size))(
        lambda context, width: probe.distribution(context, min(width, len(context)))
    )


def exact_cells(logits: Logits, case: Case, compiler: Compiler) -> Exact:
    """In the shapes of plain decoding and of a verify pass: the cells are of their mean."""
    cells: dict[Hashable, Tensor] = {}
    widths = (1, width(case.drafter, case.draft_length, DEPTH))

    def grow(prefix: Tokens, mass: Tensor) -> None:  # mass [2], one for each width
        context = (*case.prompt, *prefix)
        read = [logits(context, each) for each in widths]
        never = excluded(compiler, case.params, prefix, len(read[0]))
        each = [scores(one.masked_fill(never, -inf), case.prompt, prefix, case.params) for one in read]
        joint = mass[:, None] * torch.stack(each).softmax(-1)  # [2, V]
        likely = (joint.mean(0) >= LIKELY).nonzero()[:, 0].tolist()
        for token in likely:
            if len(prefix) + 1 == DEPTH:
                cells[*prefix, token] = joint[:, token].clone()
            else:
                grow((*prefix, token), joint[:, token].clone())
        joint[:, likely] = 0
        cells[*prefix, REST] = joint.sum(1)

    grow((), torch.ones(2, dtype=torch.float64))
    mean = {cell: float(each.mean()) for cell, each in cells.items()}
    divergence = sum((each - mean[cell]) ** 2 / mean[cell] for cell, each in cells.items() if mean[cell] > 0)
    assert isinstance(divergence, Tensor)
    return Exact(mean, float(divergence.max()))


def cell_of(tokens: Sequence[int], cells: Mapping[Hashable, float]) -> Hashable:
    """The tokens themselves, or a likely beginning of them and the rest."""
    whole = tuple(tokens)
    if whole in cells:
        return whole
    return next(rest for at in reversed(range(DEPTH)) if (rest := (*whole[:at], REST)) in cells)


def counted_mass(logits: Logits, token: int) -> float:
    """How much of the joint lies beyond a likely second token."""

    def following(*prefix: int) -> Tensor:
        return scores(logits((token, *prefix), 1), (token,), prefix, SETTINGS["T 0.5"]).softmax(-1)

    first, mass = following(), 0.0
    for likely in (first >= LIKELY).nonzero()[:, 0].tolist():
        joint = first[likely] * following(likely)
        mass += float(joint[joint >= LIKELY].sum())
    return mass
