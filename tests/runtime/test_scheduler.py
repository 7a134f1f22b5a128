"""Requests join, leave, are cancelled and fail between rounds, from any thread, and never harm each other."""

import math
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from trt_spec.engines import PREFILL_WIDTH, EngineError
from trt_spec.engines.onnxruntime import OnnxRuntimeEngine
from trt_spec.runtime import Decoder, RequestError, SamplingParams
from trt_spec.runtime.memory.row_cache import RowCache
from trt_spec.runtime.requests.request import State
from trt_spec.runtime.round import round as round_
from trt_spec.runtime.scheduling.prefill import DRAFT_BUDGET
from trt_spec.runtime.state.frame import Frame
from trt_spec.runtime.state.plan import Plan
from trt_spec.runtime.state.rows import Rows

from ..kit.bundles import Pair
from ..kit.prompts import random_prompts
from ..kit.scripts import counted, counting
from .scripted import encoded, scripted_decoder

LONG = SamplingParams(max_new_tokens=1000, ignore_eos=True)


def run_to_the_end(decoder: Decoder) -> None:
    while decoder.step():
        pass


@pytest.fixture
def decoder(tmp_path: Path):
    with scripted_decoder(tmp_path, counting, counting, max_batch=3) as decoder:
        yield decoder


# Joining and leaving.


def test_requests_beyond_the_batch_wait_and_are_admitted_as_rows_free_up(decoder: Decoder):
    lengths = [3, 30, 5, 1, 12, 7, 2]
    requests = [
        decoder.submit([10 * index], SamplingParams(max_new_tokens=length, ignore_eos=True), draft_length=1)
        for index, length in enumerate(lengths)
    ]
    most = 0
    while decoder.step():
        most = max(most, sum(request.state.value == "live" for request in requests))
    assert most == 3
    for index, (request, length) in enumerate(zip(requests, lengths, strict=True)):
        assert request.token_ids == counted(10 * index, length)
        assert request.finish_reason == "length"


def test_rows_finish_in_every_order(tmp_path: Path):
    for order in ([4, 8, 12, 16], [16, 12, 8, 4], [8, 16, 4, 12], [5, 5, 5, 5]):
        for drafter in ("model", "lookup", "none"):
            with scripted_decoder(tmp_path, counting, counting, max_batch=4) as decoder:
                outputs = decoder.generate(
                    [[7, 1, 2, 3, 50 * row] for row in range(4)],
                    [SamplingParams(max_new_tokens=length, ignore_eos=True) for length in order],
                    drafter=drafter,
                )
                for row, (output, length) in enumerate(zip(outputs, order, strict=True)):
                    assert list(output.token_ids) == counted(50 * row, length)


def test_step_says_whether_anything_is_left_to_do(decoder: Decoder):
    assert not decoder.step()
    decoder.submit([1], SamplingParams(max_new_tokens=2, ignore_eos=True), draft_length=0)  # no first token beside it
    assert decoder.step()
    assert not decoder.step()
    assert not decoder.step()


# Prefill.


def test_a_live_request_advances_in_every_step_while_a_long_prompt_is_prefilled(decoder: Decoder):
    live = decoder.submit([1, 2], LONG, draft_length=2)
    decoder.step()
    long = decoder.submit([5] * 1000, SamplingParams(max_new_tokens=3, ignore_eos=True))
    widest = []
    while not long.token_ids:
        before = len(live.token_ids)
        decoder.target.engine.widths.clear()
        decoder.step()
        assert len(live.token_ids) > before
        widest.append(sum(batch * width for batch, width in decoder.target.engine.widths))
    assert len(widest) >= 1000 // PREFILL_WIDTH
    assert max(widest) <= PREFILL_WIDTH + 2 * 17, "a step never feeds more than its budget"
    decoder.cancel(live)
    while decoder.step():
        pass
    assert long.token_ids == counted(5, 3)


def test_a_long_catch_up_of_the_draft_does_not_starve_live_rows(tmp_path: Path):
    """A request that turns to the draft model late owes it the whole context."""
    with scripted_decoder(tmp_path, counting, counting, max_length=8192) as decoder:
        late = decoder.submit([5] * 3000, LONG, drafter="none")
        live = decoder.submit([1, 2], LONG, draft_length=2)
        while not late.token_ids or not live.token_ids:
            decoder.step()
        late.draft(late.draft_length, "model")
        decoder.draft.engine.widths.clear()
        decoder.step()
        fed = sum(batch * width for batch, width in decoder.draft.engine.widths)
        assert fed <= DRAFT_BUDGET + 2 * 17
        for request in (late, live):
            decoder.cancel(request)
        decoder.step()


def test_short_prompts_are_prefilled_together_in_one_step(decoder: Decoder):
    requests = [decoder.submit([5, 6, 7, 8 * row], LONG) for row in range(3)]
    decoder.step()
    assert all(request.token_ids for request in requests)
    for request in requests:
        decoder.cancel(request)


# Draft length and drafter between rounds.


def test_draft_length_and_drafter_change_between_rounds(decoder: Decoder):
    request = decoder.submit([9, 8, 7], LONG, draft_length=3)
    proposed = []
    for drafter, k in (("model", 3), ("model", 0), ("none", 5), ("lookup", 2), ("model", 16), ("model", 1)):
        request.draft(k, drafter)
        before = request.speculation.proposed
        decoder.step()
        proposed.append(request.speculation.proposed - before)
    assert proposed == [3, 0, 0, 0, 16, 1], "the context never repeats, so lookup has nothing"
    assert request.token_ids == counted(7, len(request.token_ids))
    assert request.speculation.acceptance == 1


def test_as_many_tokens_of_each_row_are_verified_as_it_proposes(decoder: Decoder):
    """Also where rounds of one shape differ in whether all rows propose equally many."""
    requests = [decoder.submit([9, 8, 7 + row], LONG) for row in range(2)]
    for lengths in ((4, 4), (4, 2), (4, 4), (1, 4), (0, 4), (4, 4), (0, 0), (2, 2)):
        for request, length in zip(requests, lengths, strict=True):
            request.draft(length, "model")
        decoder.step()
        assert decoder.last_frame is not None
        assert decoder.last_frame.verdict.proposed.tolist() == list(lengths)
        assert decoder.last_frame.widths.tolist() == [length + 1 for length in lengths]


@pytest.mark.parametrize("value", [-1, 17, 2.0, True, None])
def test_a_draft_length_out_of_range_is_refused_between_rounds_too(decoder: Decoder, value):
    request = decoder.submit([1, 2], LONG)
    with pytest.raises(RequestError, match=r"draft_length is .*, expected auto, a whole number from 0 to 16"):
        request.draft(value, request.drafter)
    assert request.draft_length == 4


def test_turning_to_a_draft_model_that_the_bundle_lacks_is_refused(tmp_path: Path):
    with scripted_decoder(tmp_path, counting) as decoder:
        request = decoder.submit([1, 2, 3, 4], LONG)
        decoder.step()
        with pytest.raises(RequestError, match="no draft model"):
            request.draft(request.draft_length, "model")
        decoder.step()
        assert request.token_ids == counted(4, len(request.token_ids))


# Cancelling.


def test_a_waiting_a_prefilling_and_a_live_request_can_be_cancelled(decoder: Decoder):
    live = [decoder.submit([row, 1], LONG, draft_length=1) for row in range(2)]
    decoder.step()
    prefilling = decoder.submit([3] * 1000, LONG)
    waiting = decoder.submit([4, 4], LONG)
    decoder.step()
    assert [request.state.value for request in (*live, prefilling, waiting)] == ["live"] * 2 + ["prefilling", "waiting"]
    before = len(live[1].token_ids)
    for request in (waiting, prefilling, live[0]):
        decoder.cancel(request)
    decoder.step()
    for request in (waiting, prefilling, live[0]):
        assert request.finished
        assert request.finish_reason == "cancelled"
        assert request.output().finish_reason == "cancelled"
    assert len(live[1].token_ids) > before
    assert live[1].token_ids == counted(1, len(live[1].token_ids))
    assert live[0].output().token_ids == tuple(counted(1, len(live[0].token_ids)))


def test_cancelling_a_finished_request_does_nothing(decoder: Decoder):
    request = decoder.submit([1], SamplingParams(max_new_tokens=2, ignore_eos=True))
    while decoder.step():
        pass
    decoder.cancel(request)
    decoder.step()
    assert request.finish_reason == "length"


def test_the_row_behind_a_cancelled_prefill_is_reused(decoder: Decoder):
    first = decoder.submit([3] * 1000, LONG)
    decoder.step()
    decoder.cancel(first)
    [output] = decoder.generate([[7, 8]], SamplingParams(max_new_tokens=9, ignore_eos=True))
    assert list(output.token_ids) == counted(8, 9)


# Threads.


def test_many_threads_submit_and_cancel_while_one_steps(tmp_path: Path):
    """Each of 4 threads submits 25 requests and cancels every third; no output is lost, mixed up or late."""
    with scripted_decoder(tmp_path, counting, counting, max_batch=5) as decoder:
        done, failures, requests = threading.Event(), [], []

        def step() -> None:
            try:
                everything_is_there = False
                while decoder.step() or not everything_is_there:
                    everything_is_there = done.is_set()  # so there is a step after the last request has come
            except BaseException as error:
                failures.append(error)

        def submit(thread: int) -> None:
            try:
                for index in range(25):
                    first = (thread * 60 + index) % 256
                    params = SamplingParams(max_new_tokens=1 + index, ignore_eos=True)
                    request = decoder.submit([first, first], params, draft_length=index % 5)
                    requests.append((first, 1 + index, request))
                    if index % 3 == 0:
                        decoder.cancel(request)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=submit, args=(thread,)) for thread in range(4)]
        stepping = threading.Thread(target=step)
        stepping.start()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        done.set()
        stepping.join(60)
        assert not stepping.is_alive()
    assert failures == []
    assert len(requests) == 100
    for first, length, request in requests:
        assert request.finished
        assert request.token_ids == counted(first, len(request.token_ids))
        assert request.finish_reason == "cancelled" or len(request.token_ids) == length


def test_two_threads_may_generate_at_the_same_time(tmp_path: Path):
    with scripted_decoder(tmp_path, counting, counting) as decoder:
        outputs = {}

        def generate(first: int) -> None:
            params = SamplingParams(max_new_tokens=50, ignore_eos=True)
            outputs[first] = [list(output.token_ids) for output in decoder.generate([[first], [first + 1]], params)]

        threads = [threading.Thread(target=generate, args=(first,)) for first in (10, 90)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert outputs == {first: [counted(first, 50), counted(first + 1, 50)] for first in (10, 90)}


# Failures in the middle of a round.


@pytest.mark.parametrize("error", [RuntimeError("the engine failed"), KeyboardInterrupt()])
@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("runs", [1, 2, 5])
def test_an_error_in_the_middle_of_a_round_ends_its_requests_and_leaves_the_decoder_usable(
    decoder: Decoder, error: BaseException, role: str, runs: int
):
    engine = getattr(decoder, role).engine
    left = runs

    def fail() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise error

    engine.on_run = fail
    requests = [decoder.submit([row, row, row], LONG, draft_length=3) for row in range(5)]
    with pytest.raises(type(error)):
        run_to_the_end(decoder)
    engine.on_run = lambda: None
    failed = [request for request in requests if request.finished]
    assert 1 <= len(failed) <= 3
    for row, request in enumerate(requests):
        assert request.token_ids == counted(row, len(request.token_ids)), "what came out before is right"
        if request in failed:
            assert request.finish_reason == "error"
            with pytest.raises(EngineError, match="a round failed"):
                request.output()
        else:  # it had no row yet
            assert request.state is State.WAITING
            decoder.cancel(request)
    assert not decoder.step()
    outputs = decoder.generate([[1, 2], [3, 4]], SamplingParams(max_new_tokens=20, ignore_eos=True))
    assert [list(output.token_ids) for output in outputs] == [counted(2, 20), counted(4, 20)]


def test_an_interruption_between_real_runs_leaves_the_decoder_usable(llama: Pair, monkeypatch: pytest.MonkeyPatch):
    prompts = random_prompts(64, [9, 12], seed=3)
    params = SamplingParams(max_new_tokens=20)
    with Decoder.open(llama.bundle) as decoder:
        expected = [output.token_ids for output in decoder.generate(prompts, params)]
        accept, calls = round_.accept, []

        def interrupted(*arguments):
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
            accept(*arguments)

        monkeypatch.setattr(round_, "accept", interrupted)
        with pytest.raises(KeyboardInterrupt):
            decoder.generate(prompts, params)
        assert [output.token_ids for output in decoder.generate(prompts, params)] == expected


def test_a_mistake_in_one_prompt_of_generate_withdraws_the_others(decoder: Decoder):
    with pytest.raises(RequestError, match="empty"):
        decoder.generate([[1, 2], []], LONG)
    assert not decoder.step()


# Closing.


def test_a_closed_decoder_refuses_everything(tmp_path: Path):
    decoder = scripted_decoder(tmp_path, counting, counting)
    request = decoder.submit([1, 2], LONG)
    decoder.step()
    decoder.close()
    assert request.finished
    with pytest.raises(RequestError, match="the decoder was closed before the request had ended; open another"):
        request.output()
    for use in (decoder.step, lambda: decoder.submit([1]), lambda: decoder.generate([[1]])):
        with pytest.raises(RequestError, match="the decoder is closed; open another"):
            use()
    decoder.cancel(request)
    decoder.close()


def test_one_width_of_steps_per_shape_of_round(decoder: Decoder):
    """K + 1 wide for the target, two and then one for the draft; nothing is run row by row."""
    for row in range(3):
        decoder.submit([row, row], LONG, draft_length=3)
    decoder.step()
    for model in (decoder.target, decoder.draft):
        model.engine.widths.clear()
    decoder.step()
    assert decoder.target.engine.widths == [(3, 4)]
    assert decoder.draft.engine.widths == [(3, 2), (3, 1), (3, 1)]


def test_tokens_of_a_row_follow_it_when_it_moves(tmp_path: Path):
    """Lookup reads the row's own context: repeats that began before the move are found after it."""
    phrase = encoded("abcdef")

    def repeating(context) -> int:
        return phrase[(len(context) - 4) % 6]

    with scripted_decoder(tmp_path, repeating, max_batch=2) as decoder:
        decoder.submit([1, 2, 3, 4], SamplingParams(max_new_tokens=9, ignore_eos=True), draft_length=2)
        request = decoder.submit([1, 2, 3, 4], SamplingParams(max_new_tokens=60, ignore_eos=True), draft_length=2)
        while decoder.step():
            pass
    assert bytes(request.token_ids) == b"abcdef" * 10
    assert request.speculation.acceptance == 1.0


def test_committed_tokens_only_ever_grow(decoder: Decoder):
    request = decoder.submit([1, 2], SamplingParams(max_new_tokens=30, ignore_eos=True))
    seen = [tuple(request.token_ids)]
    while decoder.step():
        seen.append(tuple(request.token_ids))
    assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(seen))


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=1.0, seed=1, rule="coupled"),
    ],
)
def test_logits_that_are_no_numbers_are_an_error_and_never_a_token(
    decoder: Decoder, params: SamplingParams, role: str, on_host: bool, monkeypatch: pytest.MonkeyPatch
):
    """By the host's check, and by the one that a GPU makes; what a draft says may only cost."""
    monkeypatch.setattr(Frame, "on_host", property(lambda self: on_host, lambda self, value: None), raising=False)
    request = decoder.submit([1, 2, 3], params)
    decoder.step()
    getattr(decoder, role).engine.height = math.nan
    if role == "draft" and (params.greedy or params.rule == "coupled"):
        while decoder.step():
            pass
        assert request.token_ids == counted(3, len(request.token_ids))
        return
    with pytest.raises(EngineError, match=r"logits are NaN or infinite.* export the pair in bfloat16"):
        decoder.step()
    with pytest.raises(EngineError, match="logits are NaN or infinite"):
        request.output()
    assert request.token_ids == counted(3, len(request.token_ids)), "no token of that round came out"
    getattr(decoder, role).engine.height = 20.0
    [output] = decoder.generate([[7]], SamplingParams(max_new_tokens=5, ignore_eos=True))
    assert list(output.token_ids) == counted(7, 5), "the next request starts on clean rows"


def test_a_gpu_without_memory_is_an_error_that_says_what_is_needed(llama: Pair, monkeypatch: pytest.MonkeyPatch):
    """torch's own error for GPUs, raised where each happens: while the models open, and in a round."""
    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    needs = (
        r"no memory is left \(CUDA out .* weights take \d+ MiB, caches up to \d+ MiB for 4 rows of \d+ tokens.* "
        "lower max_batch"
    )
    with Decoder.open(llama.bundle, max_batch=4) as decoder:
        request = decoder.submit([5, 6, 7], SamplingParams(max_new_tokens=50, ignore_eos=True))
        decoder.step()
        with monkeypatch.context() as patch:
            patch.setattr(decoder.target.engine, "step", lambda *_: (_ for _ in ()).throw(full))
            request.draft(7, request.drafter)
            with pytest.raises(EngineError, match=needs):
                decoder.step()
        assert request.finish_reason == "error"
    monkeypatch.setattr(RowCache, "resize", lambda *_: (_ for _ in ()).throw(full))
    with pytest.raises(EngineError, match=needs):
        Decoder.open(llama.bundle, max_batch=4)


# Errors, and who learns of them.


@pytest.mark.parametrize("error", [RuntimeError("the engine failed"), KeyboardInterrupt()])
@pytest.mark.parametrize("use", ["generate", "stream"])
def test_an_error_in_one_thread_is_raised_to_whoever_waits_in_another(decoder: Decoder, error: BaseException, use: str):
    """A text that was cut short by another client's error, or by Ctrl-C there, must not pass for a whole one."""
    started, found = threading.Event(), []

    def client() -> None:
        params = SamplingParams(max_new_tokens=200, ignore_eos=True)
        try:
            if use == "generate":
                found.append(decoder.generate([[1, 2]], params))
            else:
                found.append([piece for piece in decoder.stream([1, 2], params) if started.set() is None])
        except EngineError as raised:
            found.append(raised)

    def fail_once_it_has_begun() -> None:
        if decoder.live and decoder.live[0].request.token_ids and threading.current_thread() is threading.main_thread():
            raise error

    decoder.target.engine.on_run = fail_once_it_has_begun
    thread = threading.Thread(target=client)
    with decoder._step_lock:
        thread.start()
        while not decoder._scheduler.seating.waiting:
            pass
        with pytest.raises(type(error)):
            decoder._scheduler.step()
    thread.join()
    [raised] = found
    assert isinstance(raised, EngineError)
    assert f"a round failed ({type(error).__name__}" in str(raised)


def test_a_request_can_be_waited_for_and_reports_its_progress(decoder: Decoder):
    seen = []
    request = decoder.submit(
        [1, 2],
        SamplingParams(max_new_tokens=10, ignore_eos=True),
        draft_length=1,
        on_progress=lambda one: seen.append((len(one.token_ids), one.finished)),
    )
    assert not request.wait(timeout=0)
    stepping = threading.Thread(target=run_to_the_end, args=(decoder,))
    stepping.start()
    assert request.wait(timeout=60)
    stepping.join()
    assert list(request.output().token_ids) == counted(2, 10)
    assert seen == [(1, False), (3, False), (5, False), (7, False), (9, False), (10, True)]


def test_a_callback_that_raises_ends_its_own_request_alone(decoder: Decoder):
    def angry(request) -> None:
        raise ValueError("no")

    bad = decoder.submit([1], SamplingParams(max_new_tokens=5, ignore_eos=True), on_progress=angry)
    good = decoder.submit([2], SamplingParams(max_new_tokens=5, ignore_eos=True))
    run_to_the_end(decoder)
    assert list(good.output().token_ids) == counted(2, 5)
    with pytest.raises(RequestError, match="on_progress raised ValueError: no; fix it"):
        bad.output()


def test_a_request_of_another_decoder_is_not_cancelled(decoder: Decoder, tmp_path: Path):
    with scripted_decoder(tmp_path / "other", counting, counting) as other:
        request = other.submit([1], LONG)
        with pytest.raises(RequestError, match="the request belongs to another decoder; cancel it there"):
            decoder.cancel(request)
        other.step()
        assert not request.finished
        other.cancel(request)


@pytest.mark.parametrize("prompts", [None, {}, 7, {"prompt": "x"}])
def test_prompts_that_are_none_are_refused_in_a_sentence(decoder: Decoder, prompts: object):
    with pytest.raises(
        RequestError, match=r"the prompts are .*, expected text, a list of token ids, or a list of prompts"
    ):
        decoder.generate(prompts)


def test_length_and_drafter_are_set_together_or_refused(decoder: Decoder):
    """A mixed drafter beside a whole length once proposed tokens without a drafter."""
    request = decoder.submit([1, 2], LONG, draft_length=3)
    before = request.drafting
    for length, drafter, message in (
        (4, "mixed", "drafter mixed needs draft_length auto, not 4"),
        ("auto", "model", "draft_length auto needs to know what rounds cost here"),
        (2, "magic", "drafter is 'magic', expected one of"),
        (17, "model", "draft_length is 17, expected auto, a whole number"),
    ):
        with pytest.raises(RequestError, match=message):
            request.draft(length, drafter)
        assert request.drafting is before
    with pytest.raises(AttributeError):
        request.drafter = "mixed"
    decoder.cancel(request)


def test_a_plan_that_proposes_without_a_source_cannot_be_made():
    with pytest.raises(ValueError, match="a plan of 3 proposals has no drafter that makes them"):
        Plan(1, 3, coupled=True)


@pytest.mark.parametrize("where", ["Rows.allocate", "open_drafters"])
def test_memory_that_runs_out_while_a_decoder_opens_closes_its_engines(
    llama: Pair, monkeypatch: pytest.MonkeyPatch, where: str
):
    closed = []
    monkeypatch.setattr(OnnxRuntimeEngine, "close", lambda self: closed.append(self))

    def full(*_: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory")

    if where == "Rows.allocate":
        monkeypatch.setattr(Rows, "allocate", full)
    else:
        monkeypatch.setattr("trt_spec.runtime.decoder.open_drafters", full)
    with pytest.raises(EngineError, match=r"no memory is left .*; lower max_batch"):
        Decoder.open(llama.bundle)
    assert len(closed) == 2


@pytest.mark.parametrize("before", [1, 2])
def test_torch_leaves_the_cores_to_the_engine_during_a_step_and_gets_them_back(llama: Pair, before: int):
    found = []
    threads = torch.get_num_threads()
    torch.set_num_threads(before)
    try:
        with Decoder.open(llama.bundle) as decoder:
            params = SamplingParams(max_new_tokens=3, ignore_eos=True)
            decoder.submit([5, 6], params, on_progress=lambda _: found.append(torch.get_num_threads()))
            run_to_the_end(decoder)
        assert set(found) == {1}
        assert torch.get_num_threads() == before
    finally:
        torch.set_num_threads(threads)
