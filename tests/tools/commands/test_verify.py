"""The command: what it says of a sound bundle, of a faulty build, and of what it cannot certify."""

import json
import re
import shutil

import pytest
from trt_spec.engines import Bundle
from trt_spec.runtime import Decoder
from trt_spec.runtime.scheduling.engine_choice import save_choice
from trt_spec.tools.certificate.effort import QUICK
from trt_spec.tools.certificate.first_tokens import SETTINGS
from trt_spec.tools.certificate.subject import controllers, spelled
from trt_spec.tools.flags.verify import CHECKS, CLAIMS

from ...kit.bundles import Pair, resave, rewrite_graph
from ...kit.costs import SIBLINGS, known_costs, table
from ...kit.faults import fault
from ...kit.models import tiny_llama
from ..conftest import assert_refused

COARSE = ("--total-variation", 0.2, "--batch", 128)


@pytest.mark.exhaustive
def test_a_sound_bundle_is_certified_with_a_table_and_json(run, llama: Pair, tmp_path):
    """All checks, drafters and controllers, the checkpoint, and torch as the other engine; no random float32 model of
    two layers has scores near enough to tie."""
    out = tmp_path / "found.json"
    with known_costs(table(batches=(1,), beside=SIBLINGS)), Decoder.open(llama.bundle) as decoder:
        drafters, ways = decoder.drafters, {spelled(k) for _, k in controllers(decoder)}
        result = run("verify", llama.bundle, *COARSE, "--checkpoint", llama.checkpoint, "--json", out)
    found = json.loads((tmp_path / "found.json").read_text())
    judged = [one for one in found["findings"] if one["passed"] is not None]
    assert result.code == 0, result.out
    assert all(one["passed"] for one in judged)
    assert found["passed"]
    assert {one["check"].replace(" ", "-") for one in found["findings"]} == set(CHECKS)
    assert not any(one["numbers"].get("near_ties") for one in found["findings"])
    lines = result.out.splitlines()
    assert lines[0].split() == ["check", "case", "result", "found"]
    assert lines[1 + len(found["findings"])] == ""
    claims = lines[2 + len(found["findings"]) : -2]
    assert [line.split(":")[0] for line in claims] == [*CLAIMS, "power"]
    assert "a fault that moves 0.2 of the probability (total variation) is caught with probability 0.99" in claims[-1]
    assert f"all {len(judged)} cases pass, 0 near ties excused" in lines[-1]
    cases = [one["case"] for one in found["findings"]]
    for expected in (
        "grammars",
        "model, K 8, batch 4",
        "lookup, K 16, batch 4",
        "model, K 3+3, batch 4",
        "rejection, T 0.5, model, K 3+3",
        "in torch",
        "draft, batch 1",
        "logits",
    ):
        assert expected in cases
    for chosen in ("model, K by entropy", "model, K auto", "suffix, K auto", "mixed, K auto"):
        assert {f"{chosen}, batch 1", f"{chosen}, batch 4"} <= set(cases)
    unjudged = {one["case"]: one["detail"] for one in found["findings"] if one["passed"] is None}
    assert unjudged.keys() == {"in tensorrt"}
    assert unjudged["in tensorrt"].startswith("not here: ")
    assert "distribution: planted fault, skipped residual" in result.err
    sampled = [one["numbers"] for one in found["findings"] if "total_variation" in one["numbers"]]
    cases_count = len(sampled)
    assert all(one["false_alarm"] == pytest.approx(1e-6 / cases_count) for one in sampled)
    fixed = [one["numbers"] for one in found["findings"] if one["case"][-1].isdigit() and one["numbers"] in sampled]
    assert len(fixed) > 6
    assert all(0 < one["acceptance"] < 1 for one in fixed), "both verdicts are seen"
    assert (found["effort"], found["total_variation"], found["power"], found["left_out"]) == ("full", 0.2, 0.99, [])
    assert_time_left_is_shown(result.err, first="checkpoint: loading", last=90)
    assert ways == {"K by entropy", "K auto"}
    lengths = ("K 1", "K 2", "K 1+3", "K 3+3")
    for expected in (*drafters, *ways, *SETTINGS, "rejection", "tokenwise", "coupled", "mixed", *lengths):
        assert any(expected in one["case"] for one in found["findings"] if one["numbers"] in sampled), expected


def test_every_draft_of_a_bundle_is_certified(run, drafts: Pair, tmp_path):
    only = ("--quick", "--only", "same-text", "--only", "rollback", "--json", tmp_path / "found.json")
    assert run("verify", drafts.bundle, *COARSE, *only).code == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["draft"] == "checkpoint and checkpoint"
    rows = {one["case"]: one["numbers"].get("comparisons") for one in found["findings"]}
    assert any(case.startswith("model2, K ") for case in rows)
    for role in ("target", "draft", "draft2"):
        assert rows[f"{role}, batch 1"] > 0


def assert_time_left_is_shown(said: str, first: str, last: int) -> None:
    lines = re.findall(r"^\[ *(\d+)%(, about \d+ (?:s|min) left)?\] (.+)$", said, re.MULTILINE)
    done = [int(share) for share, _, _ in lines]
    assert done == sorted(done), "what is done grows"
    assert done[0] == 0
    assert done[-1] > last
    assert not lines[0][1], "nothing is known yet"
    assert all(left for share, left, _ in lines if int(share) > 2)
    assert lines[0][2] == first


def test_quick_certifies_a_sound_bundle_and_says_what_it_has_left_out(run, llama: Pair, tmp_path):
    result = run("verify", llama.bundle, "--quick", "--json", tmp_path / "found.json")
    assert result.code == 0, result.out
    assert_time_left_is_shown(result.err, first="same text: plain decoding", last=80)
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["effort"], found["total_variation"], found["left_out"]) == ("quick", 0.2, list(QUICK.left_out))
    assert f"quick, so left out: {', '.join(QUICK.left_out)}" in result.out
    assert "a fault that moves 0.2 of the probability" in result.out
    cases = {one["case"] for one in found["findings"]}
    assert {"model, K 1,2,4,8,16, batch 1", "model, K 1,2,4,8,16, batch 4", "draft, batch 4"} <= cases
    assert {"model, K 1+3,2+6,3+3,6+10, batch 1", "model, K 3/8,6/30,2x2,3x2x1, batch 1"} <= cases
    for ends in (("+3", "+6", "+10"), ("3/8", "2x2")):
        assert sum(case.endswith(ends) for case in cases) == 3, "a distribution of each kind for each rule"
    assert not {"model, K 8, batch 4", "in torch"} & cases, "as is said"
    assert {one["check"] for one in found["findings"]} == set(CLAIMS) - {"checkpoint"}


def test_a_faulty_build_fails_with_exit_code_1(run, llama: Pair, tmp_path):
    with fault("log-probabilities of the row before"):
        result = run("verify", llama.bundle, "--quick", "--only", "semantics", "--json", tmp_path / "found.json")
    assert result.code == 1
    found = json.loads((tmp_path / "found.json").read_text())
    assert not found["passed"]
    assert {one["check"] for one in found["findings"]} == {"semantics"}
    assert "NOT lossless" in result.out.splitlines()[-1]
    assert "FAIL: semantics, log-probs: " in result.err
    assert any(line.split()[:3] == ["semantics", "log-probs", "FAIL"] for line in result.out.splitlines())


@pytest.mark.exhaustive
def test_a_bundle_without_a_draft_is_certified_too(run, llama: Pair):
    alone = llama.bundle.parent / "target-alone"
    result = run("verify", alone, *COARSE)
    assert result.code == 0, result.out
    assert "with no draft" in result.out
    assert "lookup, K 1, batch 4" in result.out
    assert "model, K" not in result.out


def test_a_draft_of_another_shape_is_rolled_back_like_its_target(run, unequal: Pair):
    result = run("verify", unequal.bundle, "--only", "rollback")
    assert result.code == 0, result.out


def test_the_engine_that_is_named_is_the_one_certified(run, llama: Pair, tmp_path):
    """Its arbiter and fresh prefills run in it as well. Of auto it is the one for so many requests."""
    bundle = shutil.copytree(llama.bundle, tmp_path / "bundle")
    save_choice(Bundle.open(bundle), "cpu", {1: "onnxruntime", 4: "torch"})
    only = ("--quick", "--only", "rollback", "--json", tmp_path / "found.json")
    result = run("verify", bundle, *only, "--engine", "auto", "--batch", 4)
    assert result.code == 0, result.out
    assert json.loads((tmp_path / "found.json").read_text())["engine"] == "torch"


def test_a_target_whose_weights_are_not_the_checkpoints_fails(run, llama: Pair, tmp_path):
    bundle = tmp_path / "bundle"
    shutil.copytree(llama.bundle, bundle)
    rewrite_graph(bundle, "target", llama.bundle / "target" / "model.onnx", lambda weights: weights * 1.01)
    resave(bundle)
    result = run("verify", bundle, "--only", "checkpoint", "--checkpoint", llama.checkpoint)
    assert "Loading weights" not in result.err, "no library draws a bar between"
    assert result.code == 1
    assert "checkpoint  logits" in result.out
    assert "FAIL" in result.out


# What is refused.


def test_no_bundle_is_refused_by_name(run, tmp_path):
    assert_refused(run("verify", tmp_path / "nothing"), "is not a directory; make one with export-models")


def test_the_checkpoint_of_another_model_is_refused(run, llama: Pair, tmp_path):
    other = tiny_llama(tmp_path / "other", num_hidden_layers=1)
    result = run("verify", llama.bundle, "--only", "checkpoint", "--checkpoint", other)
    assert result.code == 2
    assert "is not the one" in result.err
    assert "layers 1 instead of 2" in result.err


def test_a_check_of_the_checkpoint_needs_one(run, llama: Pair):
    assert_refused(run("verify", llama.bundle, "--only", "checkpoint"), "--only checkpoint needs --checkpoint DIR")


@pytest.mark.parametrize("value", ["0", "1", "half"])
def test_a_total_variation_that_is_none_is_refused(run, value: str):
    assert_refused(run("verify", "b", "--total-variation", value), "expected a number from 0.001 to 1")


def test_an_unknown_check_is_refused(run):
    assert_refused(run("verify", "b", "--only", "speed"), "invalid choice: 'speed'")
