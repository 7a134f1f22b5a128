"""Random rounds of a draft among others, and how far the distributions of its proposals are from an oracle's."""

import random
from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from typing import Any, Protocol

import torch
from trt_spec.engines import ROW, Bundle, Contract
from trt_spec.runtime import Decoder, Output, SamplingParams
from trt_spec.runtime.memory.budget import beside_tokens
from trt_spec.runtime.memory.snapshots import EVERY

VOCAB = 64  # tokens of the target
ENOUGH = 40  # rounds that are compared
CLOSE = 2e-4
FAR = 20 * CLOSE  # where a fault is


class Drafted(Protocol):
    """A bundle, and what one of its drafts should say."""

    @property
    def bundle(self) -> Path: ...

    @property
    def name(self) -> str:
        """Of the drafter that runs it."""

    def features(self, tokens: list[int]) -> torch.Tensor:
        """Return what it reads of the target beside each token but the first [L - 1, size], if it reads any."""

    def distributions(
        self, tokens: list[int], features: torch.Tensor, paths: list[list[int]], committed: int
    ) -> list[torch.Tensor]:
        """Return its distribution after each of these paths of proposals, after `tokens`.

        The round before has committed so many of these; 0: there was none.
        """


@torch.no_grad()
def worst_distribution(drafted: Drafted, prompt: list[int], output: Output) -> tuple[float, int]:
    """Return how far a request's proposals' distributions are from the oracle's, and how many rounds drew some."""
    worst, drawn, tokens, committed = 0.0, 0, [*prompt], 0
    features = drafted.features([*prompt, *output.token_ids])
    for one in output.trace or ():
        if one.proposal and min(one.q) < 1:  # copies are certain
            drawn += 1
            paths = [list(one.proposal[:place]) for place in range(len(one.proposal))]
            beside: list[list[int]] = []
            for sibling in one.siblings:
                before = beside[sibling.after] if sibling.after is not None else paths[sibling.place]
                beside.append([*before, sibling.token])
            found = [*zip(paths, one.proposal, one.q, strict=True)]
            found += [
                (path[:-1], path[-1], sibling.q)
                for path, sibling in zip(beside, one.siblings, strict=True)
                if sibling.q < 1  # else of a line of copies
            ]
            distributions = drafted.distributions(tokens, features, [path for path, _, _ in found], committed)
            for distribution, (_, token, q) in zip(distributions, found, strict=True):
                worst = max(worst, abs(float(distribution[token]) - q))
        said = [*one.standing, *([] if one.next_token is None else [one.next_token])]
        tokens, committed = [*tokens, *said], len(said)
    assert tokens[: len(prompt) + len(output.token_ids)] == [*prompt, *output.token_ids], "the trace tells the text"
    return worst, drawn


LINES: list[tuple[str, int | str]] = [
    *(("head", k) for k in (1, 2, 3, 5, "3+3")),
    *(("head", k) for k in (1, 4, 4)),
    ("lookup", 3),
    ("none", 0),
    ("head+lookup", 3),
    ("lookup+head", 2),
]
CHOICES = [*LINES, ("head", "4/8"), ("head", "3x2x1")]
SHARED = (1, 2, 5, 40, 70)  # tokens with which prompts begin alike


def rounds_of_all_kinds(
    decoder: Decoder,
    name: str,
    seed: int,
    requests: int = 6,
    listed: Sequence[tuple[str, int | str]] = CHOICES,
    shared: Sequence[int] = SHARED,
) -> Iterator[tuple[list[int], Output]]:
    """Decode requests that begin alike, join and leave, and change what they draft nearly every round."""
    choose, choices = random.Random(seed), [(drafter.replace("head", name), length) for drafter, length in listed]
    beginning = [choose.randrange(VOCAB) for _ in range(max(shared))]
    waiting = [[*beginning[: choose.choice(shared)], choose.randrange(VOCAB)] for _ in range(requests)]
    running: list[tuple[list[int], Any]] = []
    while waiting or not all(request.finished for _, request in running):
        if waiting and choose.random() < 0.4:
            prompt = waiting.pop()
            rule = choose.choice(["rejection", "tokenwise"])
            drafter, length = choose.choice(choices)
            params = SamplingParams(temperature=1.0, max_new_tokens=30, ignore_eos=True, seed=len(running), rule=rule)
            request = decoder.submit(prompt, params, drafter=drafter, draft_length=length, trace=True)
            running.append((prompt, request))
        decoder.step()
        for _, request in running:
            if not request.finished and choose.random() < 0.6:
                drafter, length = choose.choice(choices)
                request.draft(length, drafter)
    for prompt, request in running:
        yield prompt, request.output()


def compared(
    drafted: Drafted,
    listed: Sequence[tuple[str, int | str]] = CHOICES,
    shared: Sequence[int] = SHARED,
    far: float = inf,
    **options: Any,
) -> tuple[float, int]:
    """Return how far a distribution is from the oracle's at worst, and in how many rounds some were drawn from.

    It ends with the first request of which one is `far` away.
    """
    found: list[tuple[float, int]] = []
    with Decoder.open(drafted.bundle, max_batch=3, **options) as decoder:
        rounds = rounds_of_all_kinds(decoder, drafted.name, seed=0, listed=listed, shared=shared)
        for one in rounds:
            found.append(worst_distribution(drafted, *one))
            if found[-1][0] > far:
                break
        assert bool(decoder.prefixes.found_tokens) == ("prefix_bytes" in options)
    return max(worst for worst, _ in found), sum(drawn for _, drawn in found)


def kept_bytes(drafted: Drafted, tokens: int) -> int:
    return tokens * sum(one.cache_bytes_per_token for one in _contracts(drafted))


def room(drafted: Drafted, tokens: int, rows: int = 0) -> int:
    """Bytes for so many tokens, with copies of states among them, and for what so many rows have beside theirs."""
    contracts = _contracts(drafted)
    copies = sum(-(-state.bytes // EVERY) for one in contracts for state in one.of_kind(ROW))
    return kept_bytes(drafted, tokens) + tokens * copies + rows * sum(map(beside_tokens, contracts))


def _contracts(drafted: Drafted) -> list[Contract]:
    return [model.contract for model in Bundle.open(drafted.bundle).models.values()]
