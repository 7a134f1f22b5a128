"""The usual draft lengths are those that the engine can verify; one that was asked for and is too long is an error."""

import json

import pytest
from trt_spec.engines.onnxruntime import OnnxRuntimeEngine

from ..conftest import assert_refused

FEW = ("--max-new-tokens", 16, "--repeats", 1)


@pytest.fixture
def narrow(monkeypatch):
    """An engine like plans that trt-spec build compiled as it does by default: for four proposals."""
    monkeypatch.setattr(OnnxRuntimeEngine, "verify_width", 5)


def test_bench_leaves_out_the_usual_lengths_that_are_too_long_and_says_so(run, llama, narrow, tmp_path):
    (tmp_path / "prompts.txt").write_text("def main\n")
    result = run("bench", "--bundle", llama.bundle, *FEW, "--prompts", tmp_path / "prompts.txt", "--json")
    assert result.code == 0
    assert result.err.startswith("draft lengths 0, 1, 2, 4: the target verifies at most 4 proposals here\n")
    settings = json.loads(result.out)["settings"]
    assert [one["draft_length"] for one in settings] == [0, 1, 2, 4]


@pytest.mark.parametrize("command", [("bench", "--bundle"), ("tune",)])
def test_a_length_that_was_asked_for_and_is_too_long_is_refused_before_any_measuring(run, llama, narrow, command):
    message = (
        "--draft-lengths goes to 6, but the target verifies at most 4 proposals here; leave out what is longer, or "
        "compile wider plans with trt-spec build --draft-length 6"
    )
    assert_refused(run(*command, llama.bundle, *FEW, "--draft-lengths", "2,6"), message)
