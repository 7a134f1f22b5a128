"""Flags that come from the environment or from a file, and which of them counts."""

import json

import pytest
from trt_spec.tools.commands import export_models

from .conftest import assert_refused

PLAN = ("plan", "--json")


@pytest.fixture
def plan(run, tmp_path):
    """What `trt-spec plan` reads from these lines of a file, and from its command line."""

    def plan(lines, *arguments):
        (tmp_path / "settings.yaml").write_text(lines)
        return run(*PLAN, "--config", tmp_path / "settings.yaml", *arguments)

    return plan


def alpha(result):
    assert (result.code, result.err) == (0, "")
    return json.loads(result.out)["alpha"]


def test_a_file_comes_after_the_environment_and_that_after_the_command_line(plan, monkeypatch):
    lines = "alpha: 0.5\ncost: 0.1  # of a draft step\n"
    assert alpha(plan(lines)) == 0.5
    monkeypatch.setenv("TRT_SPEC_ALPHA", "0.6")
    assert alpha(plan(lines)) == 0.6
    assert alpha(plan(lines, "--alpha", ".7")) == 0.7
    assert alpha(plan(lines, "--alpha=.7")) == 0.7


def test_the_environment_alone_is_enough_and_names_the_file(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TRT_SPEC_ALPHA", "0.6")
    assert alpha(run(*PLAN)) == 0.6
    monkeypatch.setenv("TRT_SPEC_ALPHA", "")
    assert_refused(run(*PLAN), "the following arguments are required: --alpha")
    (tmp_path / "settings.yaml").write_text("alpha: 0.5")
    monkeypatch.setenv("TRT_SPEC_CONFIG", str(tmp_path / "settings.yaml"))
    assert alpha(run(*PLAN)) == 0.5


@pytest.mark.parametrize(
    ("command", "flag"), [("bench", ["--bundle"]), ("inspect", []), ("tune", []), ("verify", []), ("serve", [])]
)
def test_what_has_no_flag_can_stand_in_the_environment_too(run, tmp_path, monkeypatch, command, flag):
    monkeypatch.setenv("TRT_SPEC_BUNDLE", str(tmp_path / "nothing"))
    assert_refused(run(command), f"bundle {tmp_path / 'nothing'} is not a directory")
    if command != "serve":  # which may be told of a model instead
        assert_refused(run(command, *flag, tmp_path / "other"), f"bundle {tmp_path / 'other'} is not a directory")


def test_switches_lists_and_other_spellings(run, llama, tmp_path, monkeypatch):
    asked = ("generate", "--bundle", llama.bundle, "--prompt", "def main")
    written = json.loads(run(*asked, "--json", "--max-new-tokens", 9, "--ignore-eos").out)
    stops = [written["text"][5:7], written["text"][2:4]]
    stopped = run(*asked, "--max-new-tokens", 9, "--ignore-eos", "--stop", stops[0], "--stop", stops[1]).out
    file = tmp_path / "settings.yaml"
    file.write_text(json.dumps({"max_new_tokens": 9, "ignore-eos": True, "json": "no", "stop": stops}))
    assert run(*asked, "--config", file).out == stopped != written["text"]
    monkeypatch.setenv("TRT_SPEC_JSON", "yes")
    assert json.loads(run(*asked, "--config", file).out)["text"] == stopped.rstrip("\n")


def test_words_of_yaml_stay_as_they_were_written(run, llama, tmp_path):
    """YAML alone would read `no` as false, and 1e1 as a number."""
    file = tmp_path / "settings.yaml"
    file.write_text("prompt: no\nmax-new-tokens: 4\n")
    asked = ("generate", "--bundle", llama.bundle)
    assert run(*asked, "--config", file).out == run(*asked, "--prompt", "no", "--max-new-tokens", 4).out


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("alpah: 0.5", "sets alpah, which is no flag; is it alpha?"),
        ("zzz: 0.5", "sets zzz, which is no flag; leave it out"),
        ("help: true", "sets help, which is no flag"),
        ("alpha: [0.5, 0.6]", "settings.yaml is a list, expected one value"),
        ("alpha: {a: b}", "sets alpha to a structure, expected a value, or a list of values"),
        ("alpha: many", "argument --alpha: "),
        ("alpha", "holds no settings; write a flag on each line, as max-batch: 16"),
        ("[", "is not YAML ("),
        ('alpha: "a\\0b"', "a setting holds a NUL"),
    ],
)
def test_a_file_that_sets_nothing_sensible_is_refused(plan, lines, message):
    assert_refused(plan(lines), message)


def test_a_wrong_value_names_the_place_that_it_is_from(plan, run, monkeypatch):
    assert "(set by alpha in " in plan("alpha: many").err
    monkeypatch.setenv("TRT_SPEC_ALPHA", "many")
    assert "(set by TRT_SPEC_ALPHA)" in run(*PLAN).err
    monkeypatch.setenv("TRT_SPEC_ALPHA", "0.5")
    monkeypatch.setenv("TRT_SPEC_JSON", "perhaps")
    assert_refused(run("plan"), "TRT_SPEC_JSON is 'perhaps', expected true or false")


def test_names_that_others_give_meanings_of_their_own_are_left_alone(run, monkeypatch, capfd):
    """An image says its version, and Kubernetes tells the address of a service that is called trt-spec."""
    monkeypatch.setenv("TRT_SPEC_VERSION", "0.1.0")
    monkeypatch.setenv("TRT_SPEC_HELP", "me")
    monkeypatch.setenv("TRT_SPEC_PORT", "tcp://10.0.0.7:8000")
    with pytest.raises(SystemExit) as stopped:
        export_models.main(["--target", "/none", "--out", "b", "--draft", "x", "--dtype", "none"])
    assert stopped.value.code == 2
    assert "argument --dtype: invalid choice" in capfd.readouterr().err
    assert_refused(run("serve", "--bundle", "/none"), "bundle /none is not a directory")
    monkeypatch.setenv("TRT_SPEC_PORT", "many")
    assert_refused(run("serve", "--bundle", "/none"), "(set by TRT_SPEC_PORT)")


def test_a_file_that_is_not_there_is_refused(run):
    assert_refused(run(*PLAN, "--config", "/none.yaml"), "the file of settings /none.yaml cannot be read")
