"""Runs cases side by side, each on a core and a decoder of its own, where models are small.

The threads of one engine wait for each other at each operator, and for Python between two rounds: at such sizes two
decoders of one thread do about twice the work of one of two.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TypeVar

import torch

from ...runtime import Decoder
from .subject import Subject

MOST = 4  # of lanes: Python runs in one at a time
SMALL_BYTES = 2**28  # of weights, which each lane has for itself

Case = TypeVar("Case")
Found = TypeVar("Found")


def cores(subject: Subject) -> list[int]:
    """One for each lane; none where one decoder is to have them all."""
    bundle = subject.bundle
    small = sum(map(bundle.weight_bytes, bundle.names)) <= SMALL_BYTES
    if subject.device != "cpu" or not small or not hasattr(os, "sched_setaffinity"):
        return []
    return sorted(os.sched_getaffinity(0))[:MOST]


def side_by_side(
    subject: Subject, open_decoder: Callable[[], Decoder], run: Callable[[Decoder, Case], Found], cases: Sequence[Case]
) -> Iterator[Found]:
    """Yield what comes of each case, in their order; a decoder runs one case after another."""
    free = cores(subject)
    if len(free) < 2:
        with open_decoder() as decoder:
            for case in cases:
                yield run(decoder, case)
        return
    own, opening, threads = threading.local(), threading.Lock(), torch.get_num_threads()

    def run_here(case: Case) -> Found:
        with opening:
            if not hasattr(own, "decoder"):
                os.sched_setaffinity(0, {free[-1]})  # of this thread; engines count the cores that it has
                torch.set_num_threads(1)
                own.decoder = opened.enter_context(open_decoder())
                free.pop()
        return run(own.decoder, case)

    with ThreadPoolExecutor(len(free)) as pool, ExitStack() as opened:
        try:
            yield from pool.map(run_here, cases)
        finally:  # the decoders are closed before the pool waits: where nobody wants the rest, what runs ends at once
            with opening:
                free.clear()  # so that no lane opens another
            torch.set_num_threads(threads)  # of threads to come: torch gives them what the last one has set
