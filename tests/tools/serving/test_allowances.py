"""No key gets more than its requests of a minute and its rows, and no other key is kept waiting by it."""

from contextlib import suppress

import openai
import pytest
from trt_spec.tools.serving import allowances
from trt_spec.tools.serving.allowances import Allowances
from trt_spec.tools.serving.errors import ApiError

from ...kit.bundles import Pair
from ...kit.waiting import until
from .conftest import Gate, Served, serving

LONG = {"prompt": "abc", "max_tokens": 20, "ignore_eos": True}


def ask(server: Served, key: str, **fields: object) -> tuple[int, str | None]:
    answer = server.http.post("/v1/completions", json=LONG | fields, headers={"x-api-key": key})
    return answer.status_code, answer.headers.get("retry-after")


def refused(server: Served, reason: str) -> float:
    lines = server.http.get("/metrics", headers={"x-api-key": "a"}).text.splitlines()
    [line] = [line for line in lines if "over_allowance_total{" in line and f'reason="{reason}"' in line]
    return float(line.rsplit(" ", 1)[1])


def test_no_minute_has_more_requests_than_it_may_wherever_it_begins(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr(allowances.time, "monotonic", lambda: now)
    own, said = Allowances(requests=3), []
    own.on_refusal = said.append
    taken = []
    for _ in range(1000):
        with suppress(ApiError):
            own.require_request("a")
            taken.append(now)
        now += 1
    assert len(taken) == 3 * 17, "as many as may be, in 17 minutes of which the last has begun"
    assert all(later - first >= 60 for first, later in zip(taken, taken[3:], strict=False))
    assert said == ["requests_per_minute"] * (1000 - len(taken))
    now += 3600
    for wait in (0, 10, 10):
        now += wait
        own.require_request("a")
    with pytest.raises(ApiError, match="this key has made its 3 requests of a minute") as error:
        own.require_request("a")
    assert (error.value.status, error.value.headers["retry-after"]) == (429, "40")
    own.require_request("b")


def test_a_key_that_has_made_its_requests_is_told_when_to_come_back(llama: Pair):
    with serving(llama, keys=["a", "b"], allowances=Allowances(requests=2)) as server:
        assert [ask(server, "a")[0] for _ in range(2)] == [200, 200]
        status, seconds = ask(server, "a")
        assert status == 429
        assert 1 <= int(seconds) <= 60
        assert ask(server, "b")[0] == 200
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="a", max_retries=0)
        with pytest.raises(openai.RateLimitError, match="2 requests of a minute"):
            client.completions.create(model="tiny", prompt="abc")
        assert refused(server, "requests_per_minute") == 2


def test_a_key_has_no_more_rows_than_it_may_and_others_have_theirs(llama: Pair, gate: Gate):
    with serving(llama, keys=["a", "b"], allowances=Allowances(rows=2)) as server:
        body = LONG | {"n": 2, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body, headers={"x-api-key": "a"}) as unread:
            assert unread.status_code == 200
            assert ask(server, "a") == (429, "1")
            assert ask(server, "a", n=3)[0] == 400, "so many it never has"
            assert refused(server, "rows_per_key") == 1
            gate.let(10_000)
            assert ask(server, "b", n=2)[0] == 200
        until(lambda: ask(server, "a")[0] == 200)
