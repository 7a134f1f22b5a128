"""Engines count the cores that a thread may use, not those of the machine."""

import os
import threading

import pytest
from trt_spec.engines import usable_cores


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no thread to cores")
def test_the_cores_of_a_thread_are_its_own_and_those_of_the_process_are_the_first_threads() -> None:
    here, found = len(os.sched_getaffinity(0)), []

    def count() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        found.extend([usable_cores(), usable_cores(os.getpid())])

    thread = threading.Thread(target=count)
    thread.start()
    thread.join()
    assert found == [1, here]
    assert usable_cores() == here


def test_a_system_that_binds_no_thread_to_cores_has_all_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert usable_cores() == usable_cores(os.getpid()) == 12
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1
