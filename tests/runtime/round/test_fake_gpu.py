"""Rounds on a GPU that is not there: its tensors have a device and no values, and every operation on them is watched.

They are torch's fake tensors. A build of torch for the CPU can index and copy those of the device lazy, which nothing
else uses, but not those of cuda; of its device a round asks no more than whether it is the CPU.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trt_spec.engines import Bundle, Contract
from trt_spec.runtime import Decoder, EntropyRule, SamplingParams
from trt_spec.runtime.acceptance.filters import Change
from trt_spec.runtime.acceptance.seat import admit, make_rows
from trt_spec.runtime.round.growth import beside_a_line, numbers_of_distributions
from trt_spec.runtime.round.result import RowResult
from trt_spec.runtime.scheduling import capture
from trt_spec.runtime.scheduling.capture import Rounds
from trt_spec.runtime.state.asked import Share
from trt_spec.runtime.state.frame import Frame
from trt_spec.runtime.state.indexing import counting
from trt_spec.runtime.state.noise import constants
from trt_spec.runtime.state.plan import Plan
from trt_spec.runtime.state.proposal import ProposedTokens
from trt_spec.runtime.state.rows import STRETCH, Columns, branches_of
from trt_spec.runtime.state.shapes import comb, line, tree

from ...kit.bundles import DRAFTERS_OF_A_PAIR, Pair
from ...kit.recorder import Recorder
from .kinds import KINDS, IdleEngine, idle_models, plan_of

DEVICE = "lazy:0"


class Watch(TorchDispatchMode):
    """Sees every operation: nothing of the device comes to the host, and in a round nothing is on the host at all."""

    def __init__(self) -> None:
        super().__init__()
        self.in_round = False
        self.operations = {True: 0, False: 0}  # on tensors of the device, in rounds and between them

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given, made = devices((args, kwargs)), devices(found)
        self.operations[self.in_round] += "lazy" in given
        assert not (self.in_round and "cpu" in given | made), (
            f"{func} is given or makes a tensor of the host in a round"
        )
        assert not ("lazy" in given and "cpu" in made), f"{func} brings a tensor of the device to the host"
        return found

    @contextmanager
    def round(self) -> Iterator[None]:
        self.in_round = True
        try:
            yield
        finally:
            self.in_round = False


def devices(tree: Any) -> set[str]:
    return {leaf.device.type for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}


@pytest.fixture
def watch() -> Iterator[Watch]:
    """The GPU that is not there."""
    launched = capture.tabulated_round

    def watched(*arguments: Any) -> Tensor:
        with watch.round():
            return launched(*arguments)

    def forget() -> None:
        for made_once in (counting, constants, beside_a_line, numbers_of_distributions, branches_of):
            made_once.cache_clear()

    forget()
    with (
        patch.object(capture, "tabulated_round", watched),
        FakeTensorMode(),
        Watch() as watch,
    ):
        yield watch
    forget()


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    with patch.object(capture, "Record", recorder), patch.object(capture, "new_pool", lambda: "pool"):
        yield recorder


class Stage:
    """All that rounds of one kind need, on the device."""

    def __init__(self, pair: Pair, kind: str) -> None:
        bundle = Bundle.open(pair.bundle)
        vocab = bundle.tokenizer.vocab_size
        target, draft, drafters = idle_models(bundle, DEVICE, max_batch=4)
        self.plan = plan_of(kind, drafters)
        whole = make_rows(4, bundle.capacity, vocab, len(drafters), DEVICE, copied=8)
        params = SamplingParams(temperature=0.5, logit_bias={3: 1.0}, repetition_penalty=1.2, top_k=5)
        for row in range(3):
            admit(whole, row, [5, 6, 7], params, seed=2**40 + row, vocab_size=vocab)
            whole.note_source(row, [5, 6, 7], [8] * 8)
        whole.fill_uniforms(0, 3, range(STRETCH), True)
        whole.fill_uniforms(0, 3, range(STRETCH, 2 * STRETCH), True)
        whole.move(2, 1)
        k, plan = self.plan.draft_length, self.plan
        first, last = (tuple((own[place].name, k) for own in plan.lines if own) for place in (0, -1))
        shapes = comb(3, 2) if plan.leaves.branches else line(3), tree(3, 4) if plan.levels else line(3)
        shares = [Share(first[:1], shapes[0], 0.5), Share(last, shapes[1])]
        whole.ask(shares, {source.name: source.place for source in plan.drafters})
        whole.grow(shares, [plan.coupled] * 2)
        self.rows = whole.view(self.plan.batch)
        self.frame = Frame(self.plan, target)
        self._rounds = Rounds([target.engine, draft.engine])

    def launch(self) -> Tensor:
        flight = self._rounds.launch(self.rows, self.plan, self.frame, self.rows.tokens.shape[1])
        return flight.table()


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_of_the_host_takes_part_in_a_round_as_it_is_or_recorded(
    llama: Pair, watch: Watch, recorder: Recorder, kind: str
) -> None:
    stage = Stage(llama, kind)
    before = vars(stage.rows) | stage.rows.columns
    tables = [stage.launch() for _ in range(4)]
    assert recorder.launched == [1, 1], "two rounds as they are, and two from a record"
    assert watch.operations[True] > 4 * 5
    assert {table.device.type for table in tables} == {"lazy"}
    assert len({table.shape for table in tables}) == 1
    assert all(tensor is before[name] for name, tensor in (vars(stage.rows) | stage.rows.columns).items())


PLANTS: dict[str, Callable[[Tensor, Tensor], object]] = {  # each would make a GPU wait, or end a capture
    "a tensor of the host": lambda scores, host: scores + host,
    "a number of the host": lambda scores, host: scores + host[0],
    "a constant made on the host": lambda scores, host: scores + torch.zeros(64),
    "a number brought to the device": lambda scores, host: scores * torch.tensor(2.0, device=scores.device),
    "an index of the host": lambda scores, host: scores[:, host[:1].long()],
    "a copy from the host": lambda scores, host: scores.copy_(host),
    "a copy to the host": lambda scores, host: scores.cpu(),
    "a number read": lambda scores, host: scores[0, 0, 0].item(),
    "a branch": lambda scores, host: scores.isfinite().all() or scores,
    "a list": lambda scores, host: scores.tolist(),
    "numpy": lambda scores, host: scores.numpy(),
    "a shape that depends on values": lambda scores, host: scores[scores > 0],
}
READS = {
    "a number": Tensor.item,
    "a list": Tensor.tolist,
    "numpy": Tensor.numpy,
    "a copy": Tensor.cpu,
    "into a tensor of the host": lambda tensor: torch.zeros(1).copy_(tensor),
    "a branch": bool,
}
NOTICED = "tensor of the (host|device)|on the same device|_local_scalar_dense|nonzero|numpy|tolist"


@pytest.mark.parametrize("plant", PLANTS)
def test_what_a_gpu_would_wait_for_is_noticed_in_a_round(llama: Pair, watch: Watch, plant: str) -> None:
    class Planted(Change):
        def apply(self, scores: Tensor, columns: Columns, ahead: ProposedTokens | None) -> Tensor:
            PLANTS[plant](scores, host)
            return scores

    stage, host = Stage(llama, "greedy"), torch.zeros(64)
    stage.launch()
    stage.plan = replace(stage.plan, filters=(Planted(),))
    with pytest.raises((AssertionError, RuntimeError), match=NOTICED):
        stage.launch()


@pytest.mark.parametrize("read", READS)
def test_what_is_read_between_rounds_is_noticed_and_what_is_sent_is_not(watch: Watch, read: str) -> None:
    sent = torch.zeros(1, device=DEVICE)
    sent.copy_(torch.ones(1))
    with pytest.raises((AssertionError, RuntimeError), match=NOTICED):
        READS[read](sent)


class Diced:
    """In place of what the host reads of a round: numbers that a round may have decided."""

    def __init__(self) -> None:
        self.choose = random.Random(3)
        self.plans: list[Plan] = []

    def __call__(
        self, table: Tensor, plan: Plan, unchecked: Tensor | torch.dtype | None, rows: Sequence[int]
    ) -> list[RowResult]:
        assert table.device.type == "lazy"
        assert not isinstance(unchecked, Tensor)
        self.plans.append(plan)
        k = plan.draft_length
        accepted = [self.choose.randint(0, k) for _ in rows]
        return [
            RowResult(count, k, 0, [5 + i % 3 for i in range(count + 1)], [], None, (0.5,) * k) for count in accepted
        ]


@pytest.fixture
def decoder(llama: Pair, watch: Watch) -> Iterator[Decoder]:
    """On that GPU; without inference mode, in which torch makes no fake tensor of a list."""

    def open_engines(name: str, graphs: Sequence[tuple[Path, Contract]], device: str, **_: object) -> list[IdleEngine]:
        return [IdleEngine(contract, device) for _, contract in graphs]

    with (
        patch("trt_spec.runtime.scheduling.opening.open_engines", open_engines),
        patch("torch.inference_mode", nullcontext),
        Decoder.open(llama.bundle, device=DEVICE, max_batch=3) as decoder,
    ):
        yield decoder


def test_a_decoder_sends_what_a_round_needs_and_reads_nothing_but_its_table(
    decoder: Decoder, watch: Watch, recorder: Recorder
) -> None:
    """Prompts are read, rows move, drafts turn to another drafter and catch up, requests are cancelled."""
    settings = [
        SamplingParams(temperature=temperature, max_new_tokens=24, ignore_eos=True, **fields)
        for temperature, fields in [
            (0.0, {"repetition_penalty": 1.1, "logit_bias": {7: -torch.inf}}),
            (0.7, {"rule": "coupled", "logprobs": 2}),
            (0.7, {"top_k": 9, "top_p": 0.9, "min_p": 0.01, "draft_temperature": 0.4}),
        ]
    ]
    dice = Diced()
    with patch.object(capture, "read_table", dice):
        requests = [
            decoder.submit([5, 6, 7] * (2 + 10 * i), settings[i % 3], draft_length=3, drafter=name, trace=i == 1)
            for i, name in enumerate(DRAFTERS_OF_A_PAIR)
        ]
        requests[3].draft(EntropyRule(longest=4), "ngram")
        while decoder.step():
            if not decoder.live:
                continue
            one = dice.choose.choice(decoder.live).request
            if dice.choose.random() < 0.1:
                one.draft(dice.choose.choice([0, 2, 3]), dice.choose.choice(DRAFTERS_OF_A_PAIR))
            if len(requests[2].token_ids) > 9:
                decoder.cancel(requests[2])
    assert [request.finish_reason for request in requests] == ["length"] * 2 + ["cancelled"] + ["length"] * 3
    assert {drafter.name for plan in dice.plans for drafter in plan.drafters} == set(DRAFTERS_OF_A_PAIR)
    assert {plan.batch for plan in dice.plans} >= {2, 3}, "rows were freed"
    assert recorder.most_unread >= 2
    assert all(count > 100 for count in watch.operations.values())
