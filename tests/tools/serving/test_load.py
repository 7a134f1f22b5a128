"""The load generator sees what clients see, checks every text, and says what went wrong."""

import json
import threading

import pytest
from trt_spec.tools.measuring import load

from ...kit.bundles import Pair
from .conftest import Gate, Served, serving

PROPOSED = "vllm:spec_decode_num_draft_tokens_total"


def loaded(capsys: pytest.CaptureFixture[str], served: Served, *more: object) -> tuple[int, dict]:
    few = ("--rate", 40, "--seconds", 0.5, "--max-tokens", 12)
    code = load.main([str(part) for part in ("--url", served.url, *few, *more)])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_every_answer_is_counted_timed_and_compared(served: Served, llama: Pair, capsys, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc\nxyz def\n")
    out, plot = tmp_path / "load.json", tmp_path / "load.svg"
    files = ("--prompts", prompts, "--check", llama.bundle, "--json", out, "--plot", plot)
    code, found = loaded(capsys, served, *files)
    assert code == 0
    assert found["whole"] == found["requests"] > 5
    assert (found["wrong"], found["errors"], found["refused"]) == (0, [], {})
    assert 0 < found["first_token_ms"]["p50"] <= found["first_token_ms"]["p99"]
    assert found["tokens_per_second"] > 0
    assert 0 < found["own_cores"] < 1, "of its one thread, which waits for answers"
    whole = json.loads(out.read_text())
    assert len(whole["each"]) == found["whole"]
    assert "<svg" in plot.read_text()
    arrivals = [one[0] for one in whole["each"]]
    assert arrivals == sorted(arrivals)
    assert max(arrivals) < 0.5


@pytest.mark.parametrize("length", ["0", "3"])
def test_requests_ask_for_the_draft_length_that_is_given(served: Served, capsys, tmp_path, length: str):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc\n")
    before = proposed(served)
    code, _ = loaded(capsys, served, "--prompts", prompts, "--draft-length", length)
    assert code == 0
    assert (proposed(served) > before) == (length != "0")


def proposed(served: Served) -> float:
    page = served.http.get("/metrics").text
    return float(next(line for line in page.splitlines() if line.startswith(PROPOSED)).split()[-1])


def test_a_wrong_text_is_found(served: Served, llama: Pair, capsys, tmp_path, monkeypatch: pytest.MonkeyPatch):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("abc\n")
    note = load.Load._note

    def wrong(self, one, event):
        note(self, one, event)
        one.token_ids[:1] = [0] if one.token_ids[:1] != [0] else [1]

    monkeypatch.setattr(load.Load, "_note", wrong)
    code, found = loaded(capsys, served, "--prompts", prompts, "--check", llama.bundle)
    assert (code, found["wrong"]) == (1, found["whole"])


def test_refusals_are_counted_by_status(llama: Pair, capsys, gate: Gate):
    """Beyond one row and one place to wait the server says 503 while its rounds are held."""
    with serving(llama, max_batch=1, max_waiting=1) as served:
        opens = threading.Timer(1.0, gate.let, [10_000])
        opens.start()
        code, found = loaded(capsys, served, "--clients", 64)
        opens.join()
    assert found["whole"] == 2
    assert found["refused"] == {"503": found["requests"] - 2}
    assert code == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--url", "ftp://x"], "--url is 'ftp://x', expected http://host:port"),
        (["--rate", "0"], "expected a number above 0"),
        (["--prompts", "random"], "the server's vocabulary is not known"),
        (["--check", "b", "--temperature", "1"], "--check compares greedy texts"),
        (["--plot", "x.txt"], "expected .png or .svg"),
        (["--url", "http://127.0.0.1:1", "--seconds", "0.2", "--rate", "30"], "no answer came whole"),
    ],
)
def test_what_makes_no_sense_is_refused(flags, said: str, capsys):
    try:
        code = load.main(flags)
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert said in capsys.readouterr().err
