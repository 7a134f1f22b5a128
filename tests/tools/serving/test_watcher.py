"""A shard is lost while a step waits for it: the watcher and the thread that steps give all clients one reason."""

import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from trt_spec.engines import EngineEnded
from trt_spec.tools.serving import stepper

from ...kit.bundles import Pair
from ...kit.waiting import until
from .conftest import serving


@pytest.mark.parametrize("first", ["thread", "watcher"])
def test_the_first_who_knows_that_a_shard_is_lost_gives_the_reason(
    first: str, llama: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepper, "WAITING_SECONDS", 0.01)
    monkeypatch.setattr(stepper, "LEAVING_SECONDS", 0.01)
    asked, answers, fails = threading.Event(), threading.Event(), threading.Event()

    def gone() -> str:
        asked.set()
        assert answers.wait(60)
        return "the watcher knows"

    def step() -> bool:
        assert fails.wait(60)
        raise EngineEnded("the thread knows")

    with serving(llama, max_batch=1) as served, ThreadPoolExecutor() as clients:
        steps = served.service.stepper
        monkeypatch.setattr(steps, "dead", threading.Event())  # so that the server stays
        monkeypatch.setattr(served.decoder.target.engine, "gone", gone)
        monkeypatch.setattr(served.decoder, "step", step)
        client = clients.submit(httpx.post, f"{served.url}/v1/completions", json={"prompt": "abc"}, timeout=60)
        assert asked.wait(60)  # while the step waits
        if first == "thread":
            fails.set()
            until(lambda: not steps.alive)
            answers.set()
        else:
            answers.set()
            until(steps.dead.is_set)
            assert steps.alive
            fails.set()
            until(lambda: not steps.alive)
        until(steps._watching.done)
        assert str(steps.error) == f"the {first} knows"
        assert f"the decoder has failed (the {first} knows)" in client.result().text
        assert not steps.tickets
