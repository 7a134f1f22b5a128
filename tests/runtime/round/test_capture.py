"""A round can be one CUDA graph: nothing in it is read by the host, and replaying it is running it."""

import random
from collections.abc import Callable
from itertools import cycle
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from trt_spec.engines import Bundle
from trt_spec.engines.onnxruntime import OnnxRuntimeEngine
from trt_spec.runtime import Decoder, Request, SamplingParams
from trt_spec.runtime.acceptance.seat import make_rows
from trt_spec.runtime.round.result import tabulate
from trt_spec.runtime.round.round import run_round
from trt_spec.runtime.state import clock as clock_module
from trt_spec.runtime.state.clock import PARTS, Clock
from trt_spec.runtime.state.frame import Frame
from trt_spec.runtime.state.noise import constants

from ...kit.bundles import DRAFTERS_OF_A_PAIR, Pair
from ...kit.caches import probes, require_all_fresh
from ...kit.prompts import random_prompts
from ...kit.recorder import Recorder
from .kinds import KINDS, idle_models, plan_of


@pytest.mark.parametrize("kind", KINDS)
def test_no_operation_of_a_round_reads_a_tensor_on_the_host(llama: Pair, kind: str) -> None:
    """On meta tensors, which have no values to read, and which take the same branches as those of a GPU."""
    bundle = Bundle.open(llama.bundle)
    vocab = bundle.tokenizer.vocab_size
    target, _, drafters = idle_models(bundle, "meta", max_batch=4)
    plan = plan_of(kind, drafters)
    rows = make_rows(4, bundle.capacity, vocab, len(drafters), "meta").view(plan.batch)
    before = vars(rows) | rows.columns
    frame = Frame(plan, target)
    constants(rows.length.device)  # made in the two rounds before a capture
    brought = AssertionError("a number of the host is brought to the device, for which the GPU waits")
    with (
        torch.inference_mode(),
        patch.object(torch, "tensor", side_effect=brought),
        patch.object(torch, "as_tensor", side_effect=brought),
    ):
        table = tabulate(run_round(rows, plan, frame, bundle.capacity, Clock(rows.length.device)), plan)
    assert table.is_meta
    assert table.shape[0] == plan.batch
    assert all(tensor is before[name] for name, tensor in (vars(rows) | rows.columns).items()), "written in place"


@pytest.mark.parametrize(
    "read", [lambda x: x.item(), lambda x: x.tolist(), lambda x: x.numpy(), lambda x: x.nonzero(), lambda x: bool(x)]
)
def test_meta_tensors_do_notice_a_host_that_reads(read: Callable[[Tensor], object]) -> None:
    with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
        read(torch.zeros(1, device="meta"))


ASKED = (
    SamplingParams(max_new_tokens=40, temperature=0),
    SamplingParams(max_new_tokens=150, temperature=1, seed=3, top_p=0.9, presence_penalty=0.5),
    SamplingParams(max_new_tokens=40, temperature=1, seed=3, rule="coupled", logprobs=2),
)


@pytest.mark.parametrize(("drafter", "params"), [*zip(DRAFTERS_OF_A_PAIR, cycle(ASKED), strict=False)])
def test_replayed_rounds_write_the_same_text(
    llama: Pair, recorder: Recorder, params: SamplingParams, drafter: str
) -> None:
    """Of each drafter under one of these; `test_replayed.py` replays more of them, by address."""
    prompts = ["def f(", "abc abc abc abc", "x"]

    def texts() -> list[tuple[int, ...]]:
        with Decoder.open(llama.bundle, max_batch=3) as decoder:
            outputs = [*decoder.generate(prompts, params, drafter=drafter), *decoder.generate(prompts[1:], params)]
        assert all(output.logprobs for output in outputs) == (params.logprobs is not None)
        return [output.token_ids for output in outputs]

    found = texts()
    assert sum(recorder.launched) > 20, "most rounds were replayed"
    assert len(recorder.launched) < 24, "two records for each kind of round, not for each round"
    assert recorder.most_unread >= 2, "some were launched before the one before them was read"
    with patch.object(OnnxRuntimeEngine, "capturable", lambda self: False):
        assert texts() == found


def test_a_kind_of_round_is_recorded_when_it_comes_back(llama: Pair, recorder: Recorder) -> None:
    with Decoder.open(llama.bundle, max_batch=1) as decoder:
        request = decoder.submit("def f(", SamplingParams(max_new_tokens=60, temperature=0, ignore_eos=True))
        replayed = []
        for _ in range(5):
            decoder.step()
            replayed.append(sum(recorder.launched))
        assert (len(recorder.launched), replayed) == (2, [0, 0, 2, 3, 4]), "one is launched ahead"
        request.draft(2, request.drafter)
        for _ in range(3):
            decoder.step()
        assert recorder.launched == [2, 2, 1, 1]
        request.draft(4, request.drafter)
        decoder.step()
        assert recorder.launched == [3, 3, 1, 1], "the first records still hold"


def test_requests_come_go_and_change_while_a_round_is_in_flight(llama: Pair, recorder: Recorder) -> None:
    """A round that was launched ahead decides for the rows as they stood then; no text and no cache entry suffers."""
    choose = random.Random(5)
    prompts = random_prompts(64, [choose.choice([1, 2, 9, 40]) for _ in range(12)], seed=4)
    settings = [
        SamplingParams(max_new_tokens=choose.choice([1, 2, 30, 70]), temperature=i % 2, rule="coupled", seed=i)
        for i in range(len(prompts))
    ]
    with Decoder.open(llama.bundle, capture=False) as decoder:
        expected = [output.token_ids for output in decoder.generate(prompts, settings, draft_length=0)]
    with Decoder.open(llama.bundle, max_batch=3) as decoder:
        engines = probes(llama)
        requests: list[Request] = []
        while decoder.step() or len(requests) < len(prompts):
            require_all_fresh(decoder, requests, engines)
            if len(requests) < len(prompts) and choose.random() < 0.2:
                requests.append(decoder.submit(prompts[len(requests)], settings[len(requests)]))
            for request in requests:
                if choose.random() < 0.05:
                    request.draft(choose.choice([0, 1, 4]), request.drafter)
                if choose.random() < 0.01:
                    decoder.cancel(request)
    cut = [request.finish_reason == "cancelled" for request in requests]
    assert 0 < sum(cut) < len(cut) / 2
    for request, tokens in zip(requests, expected, strict=True):
        assert (
            tuple(request.token_ids)
            == tokens[: len(request.token_ids) if request.finish_reason == "cancelled" else None]
        )
    assert recorder.most_unread >= 2


def test_no_round_is_launched_ahead_that_nobody_waits_for(llama: Pair, recorder: Recorder) -> None:
    with Decoder.open(llama.bundle, max_batch=2) as decoder:
        params = SamplingParams(max_new_tokens=9, ignore_eos=True)
        decoder.generate(["def f(", "x"], params, draft_length=0)
        assert sum(recorder.launched) == 9 - 2, "two rounds as they are, and every other one once"
        assert not decoder.step()


def test_a_request_that_ends_while_others_go_on_leaves_its_row_as_it_was_read(llama: Pair, recorder: Recorder) -> None:
    with Decoder.open(llama.bundle, max_batch=2) as decoder:
        short, long = (
            decoder.submit(prompt, SamplingParams(max_new_tokens=count, ignore_eos=True), draft_length=0)
            for prompt, count in (("def f(", 6), ("x", 12))
        )
        while not short.finished:
            decoder.step()
        assert len(recorder.unread) == 1
        decoder.step()
        assert not long.finished
        assert len(short.token_ids) == 6
        assert short.speculation.rounds == 5
        while decoder.step():
            pass
        assert long.speculation.rounds == 12


def test_times_of_the_parts_are_those_of_the_latest_round(llama: Pair, recorder: Recorder) -> None:
    with Decoder.open(llama.bundle, max_batch=1) as decoder:
        request = decoder.submit("def f(", SamplingParams(max_new_tokens=60, temperature=0, ignore_eos=True))
        for _ in range(3):
            decoder.step()
        before = request.speculation.verify_ms
        with patch.object(Clock, "parts", lambda self: (1.0, 20.0, 3.0)):
            decoder.step()
        assert sum(recorder.launched) == 3
        assert request.speculation.verify_ms == pytest.approx(before + 20)


def test_a_clock_tells_its_parts() -> None:
    clock = Clock(torch.device("cpu"))
    with patch.object(clock_module, "perf_counter", iter([0, 0.5, 2, 5, 9]).__next__):
        for part in range(PARTS):
            clock.mark(part)
    assert clock.parts() == pytest.approx((1500, 3000, 4500)), "milliseconds"


def test_nothing_of_a_recorded_round_moves_on_a_gpu() -> None:
    wide = {name for name, column in make_rows(2, 64, 10, 6, "meta").columns.items() if column.shape == (2, 10)}
    assert wide == {"bias", "begin_unsaid", "prompt_counts", "output_counts", "stops", "last_tokens"}
    narrow = {name for name, column in make_rows(2, 64, 10, 6, "cpu").columns.items() if column.shape == (2, 0)}
    assert narrow == wide, "memory that few need"
