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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--longest", 3), "--longest belongs to --controller entropy; add that"),
        (("--controller", "costs", "--stop-above", 0.5), "--stop-above belongs to --controller entropy"),
        (("--controller", "entropy", "--draft-length", 4), "--draft-length 4 leaves a controller nothing to choose"),
        (("--controller", "entropy", "--longest", 17), "longest is 17, expected at most 16"),
        (("--controller", "entropy", "--drafter", "lookup"), "drafter lookup has no entropy"),
        (("--controller", "costs"), "run trt-spec tune"),
    ],
)
def test_flags_that_cannot_go_together_are_refused(run, llama, flags, message: str):
    assert_refused(run("generate", "--bundle", llama.bundle, "--prompt", "x", *flags), message)
