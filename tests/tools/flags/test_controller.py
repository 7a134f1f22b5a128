"""The flags that choose a draft length reach the request, and those that contradict one another are refused."""

import json

import pytest

from ..conftest import assert_refused


def test_by_entropy_the_text_is_that_of_plain_decoding_and_the_trace_tells_the_entropies(run, llama):
    asked = ("generate", "--bundle", llama.bundle, "--prompt", "def f(", "--max-new-tokens", 30, "--json")
    plain = json.loads(run(*asked, "--draft-length", 0).out)
    found = json.loads(run(*asked, "--controller", "entropy", "--longest", 3, "--stop-above", 0.95, "--trace").out)
    assert found["token_ids"] == plain["token_ids"]
    assert found["speculation"]["proposed"] > 0
    for traced in found["trace"]:
        assert len(traced["entropies"]) == len(traced["proposal"]) <= 3
        assert all(entropy <= 0.95 for entropy in traced["entropies"])


def test_a_comb_changes_no_greedy_text_and_the_trace_tells_its_siblings(run, llama):
    asked = ("generate", "--bundle", llama.bundle, "--prompt", "def f(", "--max-new-tokens", 30)
    plain = json.loads(run(*asked, "--json", "--draft-length", 0).out)
    comb = (*asked, "--draft-length", "3+2", "--trace")
    found = json.loads(run(*comb, "--json").out)
    assert found["token_ids"] == plain["token_ids"]
    assert any(traced["siblings"] for traced in found["trace"])
    assert all(len(traced["siblings"]) <= 2 for traced in found["trace"])
    assert run(*comb).code == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--longest", 3), "--longest belongs to --controller entropy; add that"),
        (("--controller", "costs", "--stop-above", 0.5), "--stop-above belongs to --controller entropy"),
        (("--controller", "entropy", "--draft-length", 4), "--draft-length 4 leaves a controller nothing to choose"),
        (("--controller", "entropy", "--longest", 17), "longest is 17, expected at most 16"),
        (("--controller", "entropy", "--drafter", "lookup"), "drafter lookup has no entropy"),
        (("--controller", "costs"), "run trt-spec tune"),
        (("--draft-length", "3+"), "'3+', expected auto, a whole number, a comb like 5+3, or a tree like 4/12"),
        (("--draft-length", "3+10"), "draft_length is 3+10, expected 1 to 16 levels, at most 4 children of a node"),
    ],
)
def test_flags_that_cannot_go_together_are_refused(run, llama, flags, message: str):
    assert_refused(run("generate", "--bundle", llama.bundle, "--prompt", "x", *flags), message)
