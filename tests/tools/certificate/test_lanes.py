"""Cases side by side come to what they come to one after another."""

import os
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from trt_spec.engines import RequestError
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.tools.certificate import lanes
from trt_spec.tools.certificate.subject import Subject

from ...kit.bundles import Pair

SEEDS = range(6)
# Elsewhere, as on macOS, no thread can choose its core, and `cores` gives no lanes. Linux, as in CI, skips nothing.
pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="there are no lanes on this system")


def text(decoder: Decoder, seed: int) -> tuple[int, ...]:
    params = SamplingParams(temperature=1.0, seed=seed, max_new_tokens=8, ignore_eos=True)
    [output] = decoder.generate([[1, 2]], params, draft_length=2)
    return output.token_ids


@pytest.fixture
def two_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    core = min(os.sched_getaffinity(0))
    monkeypatch.setattr(lanes, "cores", lambda subject: [core, core])


@pytest.mark.usefixtures("two_lanes")
def test_cases_side_by_side_say_the_same_in_their_order(
    llama: Pair, subject_of: Callable[..., Subject], monkeypatch: pytest.MonkeyPatch
):
    subject, both = subject_of(llama, batch=1), threading.Barrier(2, timeout=60)
    threads = set()

    def run(decoder: Decoder, seed: int) -> tuple[int, ...]:
        if seed < 2:
            both.wait()  # so that each lane has one
        threads.add(threading.get_ident())
        assert len(os.sched_getaffinity(0)) == 1
        return text(decoder, seed)

    before = os.sched_getaffinity(0)
    found = list(lanes.side_by_side(subject, subject.open, run, SEEDS))
    assert len(threads) == 2
    assert os.sched_getaffinity(0) == before, "of this thread"
    monkeypatch.setattr(lanes, "cores", lambda subject: [])
    assert found == list(lanes.side_by_side(subject, subject.open, text, SEEDS))


@pytest.mark.usefixtures("two_lanes")
def test_what_runs_ends_when_nobody_wants_the_rest(llama: Pair, subject_of: Callable[..., Subject]):
    subject, ended = subject_of(llama, batch=1), threading.Event()

    def run(decoder: Decoder, number: int) -> int:
        while number == 1:
            try:
                text(decoder, 0)
            except RequestError:
                ended.set()
                raise
        return number

    found = lanes.side_by_side(subject, subject.open, run, SEEDS)
    assert next(found) == 0
    found.close()
    assert ended.is_set()


@pytest.mark.usefixtures("two_lanes")
def test_an_error_of_a_case_is_raised(llama: Pair, subject_of: Callable[..., Subject]):
    subject = subject_of(llama, batch=1)
    with pytest.raises(ZeroDivisionError):
        list(lanes.side_by_side(subject, subject.open, lambda decoder, number: 1 / number, [1, 0]))


def test_small_models_on_a_cpu_have_a_lane_for_each_core(
    llama: Pair, subject_of: Callable[..., Subject], monkeypatch: pytest.MonkeyPatch
):
    subject = subject_of(llama)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(10)), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None, raising=False)
    assert lanes.cores(subject) == [0, 1, 2, 3]
    assert not lanes.cores(replace(subject, device="cuda"))
    monkeypatch.setattr(lanes, "SMALL_BYTES", 10)
    assert not lanes.cores(subject)
