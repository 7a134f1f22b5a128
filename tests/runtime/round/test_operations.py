"""Counts the operations of a round, each of which a GPU launches: what a line costs must not grow with other shapes."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from trt_spec.engines import Bundle
from trt_spec.runtime.acceptance.seat import make_rows
from trt_spec.runtime.round.result import tabulate
from trt_spec.runtime.round.round import run_round
from trt_spec.runtime.state.clock import Clock
from trt_spec.runtime.state.frame import Frame

from ...kit.bundles import Pair
from .kinds import KINDS, idle_models, plan_of

MOST = {  # beside those of the engines, for two rows and three proposals in a line
    "plain": 6,
    "greedy": 13,
    "rejection": 96,
    "coupled": 120,
    "tokenwise": 77,
    "lookup": 120,
    "suffix": 63,
    "cascade": 327,
    "filters": 229,
    "comb": 271,
    "coupled comb": 203,
    "tree": 454,
    "coupled tree": 304,
    "lines": 525,
    "coupled lines": 345,
}


class Counting(TorchDispatchMode):
    """Counts all operations but views."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", MOST)
def test_a_round_runs_no_more_operations_than_it_did(llama: Pair, kind: str) -> None:
    assert kind in KINDS
    bundle = Bundle.open(llama.bundle)
    target, _, drafters = idle_models(bundle, "meta", max_batch=4)
    plan = plan_of(kind, drafters)
    rows = make_rows(4, bundle.capacity, bundle.tokenizer.vocab_size, len(drafters), "meta").view(plan.batch)
    frame, found = Frame(plan, target), Counting()
    with torch.inference_mode():
        for counts in (Counting(), found):  # what is made once is made in the first
            with counts:
                tabulate(run_round(rows, plan, frame, bundle.capacity, Clock(rows.length.device)), plan)
    assert found.seen.total() <= MOST[kind], found.seen.most_common()
