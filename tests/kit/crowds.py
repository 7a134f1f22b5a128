"""Sampled texts of a crowd: requests that begin alike, give up their places, and end where their rows do."""

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from trt_spec.runtime import Decoder, Request, SamplingParams
from trt_spec.runtime.memory.full import CacheFull
from trt_spec.runtime.requests.request import State
from trt_spec.runtime.state.asked import DraftLength

from .caches import memory_for

SHARED = (0, 1, 5, 40, 70)  # tokens with which prompts begin alike
SAMPLED = SamplingParams(temperature=1.0, ignore_eos=True)
RULES = ("rejection", "tokenwise")
EVERY = 3  # rounds after which some give up their places
BEGINNING = 8  # tokens


@dataclass
class Crowd:
    """What was said behind each prompt, and after how many tokens its request went on in another place."""

    outputs: list[tuple[int, ...]]
    resumed: list[list[int]]
    found_tokens: int  # of prompts, kept by others

    def beginnings(self, texts: Sequence[Tensor]) -> list[Tensor]:
        """Return the first of what was said in each further place, of something that each text has for its tokens."""
        found = []
        for text, places in zip(texts, self.resumed, strict=True):
            begins = sorted(set(places))
            ends = [*begins[1:], len(text)]
            found += [
                text[begin : min(end, begin + BEGINNING)] for begin, end in zip(begins, ends, strict=bool(begins))
            ]
        return found


def some_prompts(count: int, vocab: int, shared: Sequence[int] = SHARED) -> list[list[int]]:
    choose = random.Random(5)
    beginning = [choose.randrange(vocab) for _ in range(max(shared))]
    return [[*beginning[: choose.choice(shared)], choose.randrange(vocab)] for _ in range(count)]


def crowd(
    bundle: Path,
    prompts: Sequence[Sequence[int]],
    choices: Sequence[tuple[str, DraftLength]],
    *,
    params: SamplingParams = SAMPLED,
    rules: Sequence[str] = RULES,
    sources: Sequence[Any] | None = None,
    rows: int = 64,
    leave: int = 4,  # how many of the youngest give up their places together
    entries: int | None = None,  # that a cache may have; None: any
    **options: Any,
) -> Crowd:
    """Let requests draft as listed, one after another, each by a rule and a seed of its own."""
    memory = nullcontext([1]) if entries is None else memory_for(entries)
    with memory as refused, Decoder.open(bundle, max_batch=rows, **options) as decoder:
        requests: list[Request] = []
        for seed, prompt in enumerate(prompts):
            drafter, length = choices[seed % len(choices)]
            most = decoder.bundle.max_length - len(prompt) - (sources is not None)
            rule = rules[seed // len(choices) % len(rules)]
            own = replace(params, seed=seed, rule=rule, max_new_tokens=most)
            source = None if sources is None else sources[seed]
            requests.append(decoder.submit(prompt, own, drafter=drafter, draft_length=length, source=source))
        seating, turn = decoder._scheduler.seating, 0
        resumed: dict[Request, list[int]] = {request: [] for request in requests}
        while decoder.step():
            turn += 1
            if turn % EVERY == 0:
                with decoder.between_rounds():
                    for _ in range(min(leave, len(seating.occupants) - 1)):
                        seating.preempt(CacheFull("others need the memory"))
                    seating._most_rows = rows  # there was room after all
            for request in requests:
                if request.state is State.WAITING and request.token_ids:
                    resumed[request].append(len(request.token_ids))
        outputs = [request.output().token_ids for request in requests]
        assert refused, "memory has run out"
        assert all(one.accepted for one in decoder.by_drafter.values())
        return Crowd(outputs, [*resumed.values()], decoder.prefixes.found_tokens)
