import json
import os
from importlib.metadata import requires, version

import pytest
from trt_spec.tools import doctor, extras


def test_it_says_what_runs_here(run):
    result = run("doctor", "--json")
    found = json.loads(result.out)
    assert result.code == 0
    assert found["engines"] == [{"name": "onnxruntime", "device": "cpu", "runs": True, "reason": None}]
    assert found["packages"]["torch"] == version("torch")
    assert found["cpu"]["cores"] == len(os.sched_getaffinity(0))
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
    assert f"onnxruntime on cpu: cannot run ({type(error).__name__}: {error})" in result.out


def test_it_works_where_there_is_no_proc(run, monkeypatch):
    monkeypatch.setattr(doctor, "_proc_field", lambda file, name: None)
    assert run("doctor").code == 0
