"""The first tokens that leave the real loop are distributed as the target alone distributes them.

Pearson's χ² of the joint of the first tokens against the exact one: float64, from the target's own logits, over the
likely tokens and, after each prefix of them, the rest. False alarms of all cases together are at most FALSE_ALARM.
The same statistic at the same threshold must catch faults that are planted in the loop.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from math import inf
from typing import Any

import torch
from torch import Tensor

from ...runtime import Decoder, SamplingParams, Speculation
from ...runtime.lengths.drafting import DraftLength
from .chi_squared import samples_needed, statistic, tail, threshold, total_variation
from .exact import scores
from .faults import fault
from .probe import Probe
from .subject import Finding, Progress, Subject, controllers, spelled

FALSE_ALARM = 1e-6
POWER = 0.99
DEPTH = 3  # tokens of the joint
LIKELY = 0.01  # of the joint: what is less likely counts as the rest of its prefix
REST = -1
CANDIDATES = 24  # prompts of one token, among which acceptance chooses
PLAIN = SamplingParams(temperature=0.5)
SETTINGS = {
    "T 0.5": PLAIN,
    "T 0.7, top-p 0.9": SamplingParams(temperature=0.7, top_p=0.9),
    "T 1, top-k 6, min-p 0.05": SamplingParams(temperature=1.0, top_k=6, min_p=0.05),
    "T 0.6, penalties, bias": SamplingParams(
        temperature=0.6, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.5, logit_bias={1: 1.0}
    ),
}
CASES = (  # of the first drafter; each other one has the first two
    ("T 0.5", "rejection", 2),
    ("T 0.7, top-p 0.9", "rejection", 1),
    ("T 0.5", "coupled", 1),
    ("T 1, top-k 6, min-p 0.05", "coupled", 2),
    ("T 0.6, penalties, bias", "rejection", 2),
)
CONTROLS = {
    "wrongly declared q": "T 0.5",
    "filter on one side only": "T 0.7, top-p 0.9",
    "skipped residual": "T 0.5",
}
CONTROL_SAMPLES = (3_000, 12_000, 24_000)  # few catch most faults; more are taken only where they do not

Cell = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    settings: str
    rule: str
    drafter: str
    draft_length: DraftLength
    prompt: tuple[int, ...]

    @property
    def params(self) -> SamplingParams:
        return replace(SETTINGS[self.settings], rule=self.rule, max_new_tokens=DEPTH, ignore_eos=True)

    def __str__(self) -> str:
        return f"{self.rule}, {self.settings}, {self.drafter}, {spelled(self.draft_length)}"


@dataclass(frozen=True)
class Exact:
    """The probabilities of the cells, and how far shapes that round differently lie apart."""

    cells: dict[Hashable, float]
    divergence: float  # the larger Σ (p' − p)² / p of a shape p' against their mean p


@dataclass(frozen=True)
class Test:
    """χ² at a threshold that all cases share out, of samples that catch the stated total variation."""

    exact: Exact
    false_alarm: float
    total_variation: float

    @property
    def samples(self) -> int:
        freedom = max(1, len(self.exact.cells) - 1)
        return samples_needed(freedom, self.total_variation, self.false_alarm, POWER, self.exact.divergence)

    def judge(self, observed: Counter[Hashable]) -> dict[str, Any]:
        value, freedom = statistic(observed, self.exact.cells)
        noncentrality = observed.total() * self.exact.divergence
        return {
            "samples": observed.total(),
            "cells": len(self.exact.cells),
            "chi_squared": None if value == inf else value,
            "threshold": threshold(self.false_alarm, freedom, noncentrality),
            "p_value": 0.0 if value == inf else tail(value, freedom, noncentrality),
            "false_alarm": self.false_alarm,
            "total_variation_seen": total_variation(observed, self.exact.cells),
            "shapes_divergence": self.exact.divergence,
        }


def check(subject: Subject, total_variation: float, progress: Progress) -> Iterator[Finding]:
    frequent = Counter(token for prompt in subject.prompts() for token in prompt)
    probe = Probe(subject)
    try:
        with subject.open() as decoder:
            drafters = decoder.drafters
            longest = decoder.longest_draft
            candidates = [token for token, _ in frequent.most_common(CANDIDATES)]
            prompts = choose_prompts(decoder, probe, drafters, candidates)
            rules = controllers(decoder)
        cases = [
            Case(settings, rule, drafter, min(k, longest), prompts[drafter])
            for drafter in drafters
            for settings, rule, k in (CASES if drafter == drafters[0] else CASES[:1])
        ]
        settings, rule, _ = CASES[0]
        cases += [Case(settings, rule, drafter, k, prompts.get(drafter, prompts[drafters[0]])) for drafter, k in rules]
        tests = [Test(exact_cells(probe, case), FALSE_ALARM / len(cases), total_variation) for case in cases]
    finally:
        probe.close()
    for case, test in zip(cases, tests, strict=True):
        progress(f"distribution: {test.samples:,} samples of {case}")
        yield sampled(subject, case, test)
    first = {case.settings: (case, test) for case, test in reversed(list(zip(cases, tests, strict=True)))}
    for name, settings in CONTROLS.items():
        progress(f"distribution: control, {name}")
        yield control(subject, name, *first[settings])


def sampled(subject: Subject, case: Case, test: Test) -> Finding:
    observed, speculation = draw(subject, case, test, test.samples)
    numbers = test.judge(observed) | {"power": POWER, "total_variation": test.total_variation}
    acceptance = speculation.acceptance
    seen = {None: "nothing proposed", 0.0: "all rejected", 1.0: "all accepted"}.get(
        acceptance, f"{acceptance or 0:.0%} accepted"
    )
    detail = (
        f"p = {numbers['p_value']:.2g} of {numbers['samples']:,} samples in {numbers['cells']} cells, {seen}; "
        f"catches a total variation of {test.total_variation:g}"
    )
    passed = numbers["p_value"] >= test.false_alarm
    return Finding("distribution", str(case), passed, detail, numbers | {"acceptance": acceptance})


def control(subject: Subject, name: str, case: Case, test: Test) -> Finding:
    """Fails where the planted fault is not seen; one that cannot do harm, as no proposal is rejected, is not judged."""
    for samples in CONTROL_SAMPLES:
        with fault(name):
            observed, speculation = draw(subject, case, test, samples)
        numbers = test.judge(observed)
        if caught := numbers["p_value"] < test.false_alarm:
            break
    detail = (
        f"p = {numbers['p_value']:.2g} of {numbers['samples']:,} samples, "
        f"total variation {numbers['total_variation_seen']:.2f}"
    )
    harmless = not caught and speculation.accepted == speculation.examined
    if harmless:
        detail = "no proposal was ever rejected, so that it changes nothing"
    passed = None if harmless else caught
    return Finding("distribution", f"planted: {name}", passed, detail, numbers | {"caught": caught})


def draw(subject: Subject, case: Case, test: Test, samples: int) -> tuple[Counter[Hashable], Speculation]:
    """Cells of the first tokens of so many requests, each with a seed of its own."""
    with subject.open(capture=False) as decoder:
        requests = [
            decoder.submit(
                case.prompt, replace(case.params, seed=seed), draft_length=case.draft_length, drafter=case.drafter
            )
            for seed in range(samples)
        ]
        while decoder.step():
            pass
        observed = Counter(cell_of(request.token_ids, test.exact.cells) for request in requests)
        return observed, decoder.speculation


def cell_of(tokens: Sequence[int], cells: dict[Hashable, float]) -> Hashable:
    """The tokens themselves, or a likely beginning of them and the rest."""
    whole = tuple(tokens)
    if whole in cells:
        return whole
    return next(rest for at in reversed(range(DEPTH)) if (rest := (*whole[:at], REST)) in cells)


def exact_cells(probe: Probe, case: Case) -> Exact:
    """In the shapes of plain decoding and of a verify pass: the cells are of their mean."""
    cells: dict[Hashable, Tensor] = {}
    widths = (1, case.draft_length + 1 if isinstance(case.draft_length, int) else DEPTH)

    def grow(prefix: Cell, mass: Tensor) -> None:  # mass [2], one for each width
        context = [*case.prompt, *prefix]
        shares = torch.stack(
            [
                scores(probe.logits(context, min(width, len(context))), case.prompt, prefix, case.params).softmax(-1)
                for width in widths
            ]
        )
        joint = mass[:, None] * shares  # [2, V]
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


def choose_prompts(
    decoder: Decoder, probe: Probe, drafters: Sequence[str], candidates: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """For each drafter one token, so that nothing is prefilled: after it proposals are rejected as often as accepted,
    and few tokens are likely."""
    tried = list(islice(cycle(candidates), 16 * len(candidates)))
    settings = [replace(PLAIN, max_new_tokens=DEPTH, ignore_eos=True, seed=seed) for seed in range(len(tried))]
    counted = {token: counted_mass(probe, token) for token in candidates}
    chosen: dict[str, tuple[int, ...]] = {}
    for drafter in drafters:
        outputs = decoder.generate([[token] for token in tried], settings, draft_length=1, drafter=drafter)
        seen = {token: Speculation() for token in candidates}
        for token, output in zip(tried, outputs, strict=True):
            seen[token].add(output.speculation)

        def worth(token: int) -> float:
            acceptance = seen[token].acceptance or 0.0  # noqa: B023  # used at once
            return acceptance * (1 - acceptance) * counted[token]

        chosen[drafter] = (max(candidates, key=worth),)
    return chosen


def counted_mass(probe: Probe, token: int) -> float:
    """How much of the joint lies beyond a likely second token."""
    cells = exact_cells(probe, Case("T 0.5", "rejection", "", 1, (token,))).cells
    return sum(mass for cell, mass in cells.items() if isinstance(cell, tuple) and len(cell) == DEPTH)
