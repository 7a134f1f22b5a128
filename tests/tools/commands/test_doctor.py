import json
from importlib.metadata import requires, version

import pytest
import torch
from torch._inductor import config as inductor_config
from trt_spec.engines import usable_cores
from trt_spec.export.foreign import BothWays
from trt_spec.tools import extras
from trt_spec.tools.commands import doctor
from trt_spec.tools.theory import lines as theory

from ...kit.bundles import Pair, export_pair
from ...kit.foreign import merging_draft
from ...kit.models import tiny_llama
from ..conftest import assert_refused


def test_it_says_what_runs_here(run):
    result = run("doctor", "--json")
    found = json.loads(result.out)
    assert result.code == 0
    here = [engine for engine in found["engines"] if engine["device"] == "cpu"]
    assert here == [
        {"name": name, "device": "cpu", "library": library, "runs": True, "reason": None}
        for name, library in (
            ("onnxruntime", "onnxruntime"),
            ("openvino", "openvino"),
            ("openvino-bfloat16", "openvino"),
            ("torch", "onnx"),
            ("torch-compiled", "onnx"),
        )
    ]
    on_gpu = {(e["name"], e["library"]): e for e in found["engines"] if e["device"] == "cuda"}
    assert set(on_gpu) == {
        ("onnxruntime", "onnxruntime"),
        ("torch", "onnx"),
        ("torch-compiled", "onnx"),
        ("tensorrt", "tensorrt"),
        ("tensorrt", "tensorrt_rtx"),
    }
    in_torch = on_gpu["torch", "onnx"]
    assert in_torch["runs"] == torch.cuda.is_available() == (in_torch["reason"] is None)
    assert found["packages"]["torch"] == version("torch")
    assert found["cpu"]["cores"] == usable_cores()
    assert 0 < found["memory"]["available_bytes"] <= found["memory"]["total_bytes"]


def test_every_extra_of_the_package_has_a_purpose_and_its_packages():
    declared = {line.split("extra == ")[1].strip("\"'") for line in requires("trt-spec") if "extra == " in line}
    assert set(doctor.PURPOSES) == declared
    assert extras.requirements()["cpu"] == ["onnxruntime"]
    assert "torch" in extras.requirements()[None]


def test_a_missing_extra_comes_with_its_pip_command(run, monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda name: None if name == "transformers" else "1.0")
    found = {extra["name"]: extra for extra in json.loads(run("doctor", "--json").out)["extras"]}
    assert found["export"]["install"] == "pip install 'trt-spec[export]'"
    assert found["export"]["packages"]["transformers"] is None
    assert found["cpu"]["install"] is None
    assert "pip install 'trt-spec[export]'" in run("doctor").out


@pytest.mark.parametrize("error", [ImportError("no module"), OSError("libgomp.so.1: cannot open shared object file")])
def test_an_engine_that_does_not_load_is_said_so_with_the_reason(run, monkeypatch, error):
    def fail(name):
        raise error

    monkeypatch.setattr(doctor, "import_module", fail)
    result = run("doctor")
    assert result.code == 1
    for engine in ("onnxruntime", "torch"):
        assert f"{engine} on cpu: cannot run ({type(error).__name__}: {error})" in result.out


def test_where_no_compiler_works_compiled_code_is_refused_by_its_name(run, llama: Pair):
    said = "torch-compiled on cpu: cannot run (there is no C++ compiler that works; install g++"
    asked = ("--engine", "torch-compiled", "--prompt", "a", "--max-new-tokens", 20)
    with inductor_config.patch({"cpp.cxx": ("nothing",)}):
        assert said in run("doctor").out
        refused = run("generate", "--bundle", llama.bundle, *asked)
    assert_refused(refused, "finds no C++ compiler that works; install g++")


def test_it_works_where_there_is_no_proc(run, monkeypatch):
    monkeypatch.setattr("trt_spec.tools.machine._proc_field", lambda file, name: None)
    assert run("doctor").code == 0


def test_a_pair_is_judged_from_its_checkpoints_and_from_its_bundle(run, unequal):
    draft = unequal.bundle.parent / "draft"
    result = run("doctor", "--target", unequal.checkpoint, "--draft", draft, "--json")
    reads = [f"letting {one} read the text" for one in (unequal.checkpoint, draft)]
    assert [line.partition("] ")[2] for line in result.err.splitlines()] == [*reads, "timing a token of each"]
    found = json.loads(result.out)
    exported = json.loads(run("doctor", "--target", unequal.bundle, "--json").out)
    for one in (found, exported):
        assert one["cost_ratio"] == one["draft_ms"] / one["target_ms"] > 0
        assert [row["temperature"] for row in one["temperatures"]] == [0.0, 0.7, 1.0]
        for row in one["temperatures"]:
            assert 0 <= row["alpha"] <= row["alpha"] + sum(row["siblings"]) <= 1
            assert len(row["siblings"]) == 3
            k = row["best_draft_length"]
            assert row["speed_up"] == pytest.approx(theory.speed_up(row["alpha"], k, one["cost_ratio"]))
    for ours, theirs in zip(found["temperatures"], exported["temperatures"], strict=True):
        assert ours["alpha"] == pytest.approx(theirs["alpha"], abs=1e-3), "the same models, in torch and in a graph"
    text = run("doctor", "--target", unequal.bundle).out
    assert text.startswith("one token map, one set of special ids\n")
    assert f"α = {exported['temperatures'][2]['alpha']:.3f}" in text
    assert "; siblings would add 0." in text


def test_each_draft_of_a_bundle_can_be_judged(run, drafts):
    found = [
        json.loads(run("doctor", "--target", drafts.bundle, *named, "--json").out)["temperatures"]
        for named in ((), ("--draft", "draft"), ("--draft", "draft2"))
    ]
    alphas = [[row["alpha"] for row in rows] for rows in found]
    assert alphas[0] == alphas[1]
    assert alphas[2][2] < alphas[0][2], "it has more noise"


def test_acceptance_is_the_overlap_of_the_two_distributions(run, twin):
    found = json.loads(run("doctor", "--target", twin.bundle, "--json").out)
    assert [row["alpha"] for row in found["temperatures"]] == pytest.approx([1, 1, 1])


def test_a_draft_that_lacks_tokens_is_measured_too(run, unequal, tmp_path):
    other = tiny_llama(tmp_path / "other", vocab=60)
    result = run("doctor", "--target", unequal.checkpoint, "--draft", other)
    assert result.code == 0
    assert "4 tokens that" in result.out


def test_a_draft_with_tokens_of_its_own_is_measured_in_both_ways(run, unequal, tmp_path):
    """Of two checkpoints as of the bundle that holds them."""
    other = merging_draft(tmp_path / "other")
    pair = export_pair(unequal.checkpoint, tmp_path / "bundle", other)
    found = []
    for named in (("--target", unequal.checkpoint, "--draft", other), ("--target", pair.bundle)):
        result = run("doctor", *named)
        assert "of its own, which can say 64 of the target's 64; drafter common would be accepted" in result.out
        assert "; drafter text would be accepted" in result.out
        found.append(json.loads(run("doctor", *named, "--json").out))
    for checkpoints, bundle in zip(*(one["ways"].values() for one in found), strict=True):
        assert checkpoints == pytest.approx(bundle, abs=1e-3)
    better = found[0]["ways"][found[0]["drafter"]]
    assert [row["alpha"] for row in found[0]["temperatures"]] == pytest.approx(list(better.values()))


def test_what_a_draft_writes_costs_as_many_steps_as_it_has_tokens(run, unequal, tmp_path, monkeypatch):
    other = merging_draft(tmp_path / "other", pairs=b"")
    monkeypatch.setattr(BothWays, "better", lambda both, temperatures: "text")
    result = run("doctor", "--target", unequal.checkpoint, "--draft", other, "--json")
    found = json.loads(result.out)
    assert found["own_tokens"] == pytest.approx(1.0)
    assert not any(row["siblings"] for row in found["temperatures"]), "it has no second best"


def test_a_pair_that_cannot_work_is_refused_with_the_reason(run, unequal, tmp_path, capfd):
    other = tiny_llama(tmp_path / "other", vocab=200)
    capfd.readouterr()  # transformers' progress
    for arguments, expected in (
        (("--target", unequal.checkpoint), "is not a bundle, and there is no --draft"),
        (("--target", unequal.bundle, "--draft", other), "is a bundle, which holds its own draft"),
        (("--draft", other), "name the --target as well"),
        (("--target", tmp_path / "missing", "--draft", other), "is neither a directory here nor a model's name"),
        (("--target", unequal.bundle, "--text", tmp_path / "missing"), "cannot be read"),
    ):
        assert_refused(run("doctor", *arguments), expected)
