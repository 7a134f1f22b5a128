"""Check that a cache equals a fresh prefill whatever rounds did to it: target and drafts, every row.

Requests with random draft lengths, one line or several, and combs, which change from round to round as their drafters
do, join, are cancelled and leave, so rows move and roll back in every pattern; sampling at temperature 1, by one rule
or the other, both accepts and rejects. Where layers are recurrent, long prompts are read before, side by side and again
when their beginnings are kept, and the same rounds must catch faults that are planted in what states absorb.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, product
from math import inf, isnan

import torch

from ...engines.bundle import FOREIGN
from ...runtime import Decoder, Request, SamplingParams
from ...runtime.drafters import DRAFTERS
from ...runtime.memory.model import Model
from ...runtime.memory.snapshots import EVERY
from ...runtime.scheduling.prefill import NARROWEST
from ...runtime.state.asked import BESIDE
from .effort import Effort
from .probe import Probe, Probes, fresh_step
from .state_faults import STATE_FAULTS, state_fault
from .subject import Choice, Finding, Progress, Subject, combs_and_trees, controllers, draft_lengths, several

ROWS = 4
COARSE = 0.3
RULES = ("rejection", "coupled")
CHANGE, CANCEL = 0.4, 0.01  # how likely in a round of a request
PREFIX_BYTES = 2**28
PADDED, FEW = 3, 4  # tokens: of padding, and new ones


@dataclass
class Worst:
    """The largest differences seen of one model."""

    comparisons: int = 0
    logits: float = 0.0
    entries: float = 0.0  # ‖found − fresh‖ ÷ ‖fresh‖ of a cache entry's keys or values

    def add(self, logits: float, entries: float) -> None:
        self.comparisons += 1
        logits, entries = (inf if isnan(one) else one for one in (logits, entries))
        self.logits, self.entries = max(self.logits, logits), max(self.entries, entries)

    def passes(self, rounding: float) -> bool:
        """A wrong entry is another vector altogether, so that even a coarse limit sees it."""
        return self.logits <= rounding and self.entries <= min(COARSE, 3 * rounding)


def check(subject: Subject, probes: Probes, effort: Effort, progress: Progress) -> Iterator[Finding]:
    batches = sorted({1, min(ROWS, subject.batch)})
    controls = [*STATE_FAULTS] if is_recurrent(subject) else []
    total = len(batches) + len(controls)
    for number, batch in enumerate(batches):
        worst = {role: Worst() for role in probes}
        with subject.open(batch, prefix_bytes=prefix_bytes(subject)) as decoder:
            for finished in all_rounds(subject, decoder, effort, seed=batch):
                compare_all(decoder, probes, worst)
                done = number + finished / effort.requests
                progress(f"rollback: random rounds, batch {batch}", done, total)
            accepted = decoder.speculation.acceptance
        for role, one in worst.items():
            detail = (
                f"{one.comparisons} rows compared, logits within {one.logits:.2g} of a fresh prefill (allowed "
                f"{subject.rounding:g}), cache entries within {one.entries:.2g}; {accepted or 0:.0%} accepted"
            )
            numbers = {"comparisons": one.comparisons, "logits": one.logits, "entries": one.entries}
            passed = one.passes(subject.rounding)
            yield Finding("rollback", f"{role}, batch {batch}", passed, detail, numbers | {"acceptance": accepted})
    for number, name in enumerate(controls, len(batches)):
        progress(f"rollback: planted fault, {name}", number, total)
        yield control(subject, probes, effort, name, batches[-1])


def control(subject: Subject, probes: Probes, effort: Effort, name: str, batch: int) -> Finding:
    """Fails where the planted fault is not seen; one that changes nothing here is not judged."""
    worst = {role: Worst() for role in probes}
    changed: list[str] = []

    def passes() -> bool:
        return all(one.passes(subject.rounding) for one in worst.values())

    with subject.open(batch, capture=False, prefix_bytes=prefix_bytes(subject)) as decoder:
        rounds = all_rounds(subject, decoder, effort, seed=batch)
        while passes():
            with state_fault(name, changed):  # not in the probes
                if next(rounds, None) is None:
                    break
            compare_all(decoder, probes, worst)
    caught = not passes()
    role, one = max(worst.items(), key=lambda item: (item[1].logits, item[1].entries))
    detail = (
        f"{role}: logits within {one.logits:.2g} of a fresh prefill, cache entries within {one.entries:.2g}, "
        f"{one.comparisons} rows compared"
    )
    if not (changed or caught):
        detail = "it never had anything to change"
    numbers = {"caught": caught, "logits": one.logits, "entries": one.entries}
    return Finding("rollback", f"planted: {name}", caught if changed or caught else None, detail, numbers)


def is_recurrent(subject: Subject) -> bool:
    return any(model.contract.recurrent for model in subject.bundle.models.values())


def prefix_bytes(subject: Subject) -> int | None:
    return PREFIX_BYTES if is_recurrent(subject) else None


def all_rounds(subject: Subject, decoder: Decoder, effort: Effort, seed: int) -> Iterator[int]:
    """Yields as `random_rounds` does; 0 for as long as long prompts are read, where layers are recurrent."""
    if is_recurrent(subject):
        for _ in long_prompts(subject, decoder):
            yield 0
    yield from random_rounds(subject, decoder, effort, seed)


def long_prompts(subject: Subject, decoder: Decoder) -> Iterator[None]:
    """Two that begin alike, of which one is padded if they are read together, and again, to find their beginnings."""
    room = min(subject.bundle.max_length - FEW, EVERY + NARROWEST + PADDED)
    prompt = list(islice(cycle(subject.prompts(1)[0]), room))
    params = SamplingParams(max_new_tokens=FEW, ignore_eos=True)
    for _ in range(2):
        some = [prompt, prompt[:-PADDED]]
        requests = [decoder.submit(one, params, drafter=decoder.drafters[0], draft_length=1) for one in some]
        while not all(request.finished for request in requests):
            decoder.step()
            yield


def random_rounds(subject: Subject, decoder: Decoder, effort: Effort, seed: int) -> Iterator[int]:
    """Yields after each step, between rounds, how many requests have ended."""
    choose = random.Random(seed)
    drafters = [*decoder.drafters, *(name for name in 3 * decoder.drafters if DRAFTERS[name].needs_model), "none"]
    lines: list[Choice] = [*product(drafters, [0, *draft_lengths(decoder)]), *controllers(decoder)]
    hung: list[Choice] = [(drafter, comb) for drafter in drafters for comb in combs_and_trees(decoder, drafter)]
    beside: list[Choice] = [*several(decoder)]
    beside += 3 * [
        (drafter, k) for drafter, k in beside if any(DRAFTERS[name].needs_model for name in drafter.split(BESIDE))
    ]
    kinds = [lines, hung or lines, beside or lines]
    prompts, most = subject.prompts(), subject.room(effort.new_tokens)
    waiting = [
        (choose.choice(prompts)[: choose.choice([1, 2, 3, 10, 40])], choose.randint(most // 2, most))
        for _ in range(effort.requests)
    ]
    requests: list[Request] = []
    while waiting or not all(request.finished for request in requests):
        for prompt, new_tokens in waiting[: choose.randint(0, 2)]:
            rule, seed = choose.choice(RULES), len(requests)
            params = SamplingParams(temperature=1.0, max_new_tokens=new_tokens, ignore_eos=True, seed=seed, rule=rule)
            drafter, draft_length = choose.choice(choose.choice(kinds))
            requests.append(decoder.submit(prompt, params, drafter=drafter, draft_length=draft_length))
            waiting.pop(0)
        decoder.step()
        yield sum(request.finished for request in requests)
        for request in requests:
            if choose.random() < CHANGE:
                drafter, draft_length = choose.choice(choose.choice(kinds))
                request.draft(draft_length, drafter)
            if choose.random() < CANCEL:
                decoder.cancel(request)


def compare_all(decoder: Decoder, probes: Mapping[str, Probe], worst: Mapping[str, Worst]) -> None:
    """Every live row of all models with a fresh prefill of its tokens, which may be a model's own."""
    for row, request in enumerate(occupant.request for occupant in decoder.live):
        if request.finished:  # its row is kept until a round in flight is read
            continue
        tokens = [*request.prompt, *request.token_ids]
        assert decoder.target.cache.entries[row] == len(tokens) - 1, "all committed tokens but the last"
        for role, model in zip(decoder.bundle.names, (decoder.target, *decoder.drafts), strict=True):
            if entries := model.cache.entries[row]:
                with decoder.between_rounds():
                    worst[role].add(*deviation(model, row, tokens[: entries + 1], probes[role]))
        if decoder.foreign is not None:
            own = decoder.foreign.holds(request)[: decoder.foreign.model.cache.entries[row]]
            if len(own) > 1:
                with decoder.between_rounds():
                    worst[FOREIGN].add(*deviation(decoder.foreign.model, row, own, probes[FOREIGN]))


def deviation(model: Model, row: int, tokens: Sequence[int], probe: Probe) -> tuple[float, float]:
    """Return how far the logits after `tokens` are off, and the entries of all but the last in the row's cache."""
    entries = len(tokens) - 1
    expected = probe.logits(tokens)
    error = 0.0
    for name in model.engine.contract.cache_names:
        fresh = probe.model.cache.read(0, name)[:, :entries].float()
        found = model.cache.read(row, name)[:, :entries].float()
        error = max(error, float(((found - fresh).norm(dim=-1) / fresh.norm(dim=-1)).max()))
    names = model.engine.contract.cache_names
    if names and entries == model.cache.read(row, names[0]).shape[1]:
        return 0.0, error
    # It writes after what is live, as the next round will.
    step = fresh_step(model, row, 1, 1, goes_on=True)
    step.input_ids[0, 0], step.start[0] = tokens[-1], entries
    step.run()
    found = step.logits[0, -1, : model.vocab_size].cpu()
    return float(torch.dist(found, expected, torch.inf)), error
