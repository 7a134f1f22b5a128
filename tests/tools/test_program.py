"""Whatever a user asks for, a program ends with one sentence and an exit code, never with a traceback."""

import json
import shutil
from dataclasses import replace

import pytest
from trt_spec.engines import Bundle
from trt_spec.runtime import Decoder
from trt_spec.tools.commands import export_models
from trt_spec.tools.flags.sampling import LARGEST_BATCH
from trt_spec.tools.program import exit_code

from .conftest import assert_refused

HALF = "\ud800"  # of a surrogate pair: no shell can pass it, another program can
BYTE = "\udcff"  # how Python reads the byte 0xff of a shell, which a path may hold
NESTED = "[" * 100_000


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "--bundle", "b", "--prompt", f"a{HALF}"),
        ("generate", "--bundle", f"b{HALF}", "--prompt", "a"),
        ("generate", "--bundle", "b", "--prompt-file", HALF),
        ("generate", "--bundle", "b", "--prompt", "a", "--stop", HALF),
        ("generate", "--bundle", "b", "--prompt", "a", "--trace-html", HALF),
        ("bench", "--bundle", "b", "--prompts", HALF),
        ("plan", "--alpha", ".5", "--plot", f"{HALF}.svg"),
        ("demo", "--prompt", HALF),
        (HALF,),
        ("demo", f"--{HALF}"),
    ],
)
def test_half_a_character_is_refused_wherever_it_stands(run, command):
    number = next(i for i, word in enumerate(command, 1) if HALF in word)
    assert_refused(
        run(*command), rf"argument {number} holds '\ud800', which is not a character of Unicode; leave it out"
    )


def test_a_nul_is_refused_wherever_it_stands(run):
    said = "argument 3 holds a NUL, which no path and no prompt may"
    assert_refused(run("generate", "--bundle", "a\0b", "--prompt", "a"), said)


def test_export_models_refuses_the_same(capfd):
    with pytest.raises(SystemExit) as stopped:
        export_models.main(["--target", HALF, "--out", "b"])
    assert stopped.value.code == 2
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("export-models: error: argument 2 holds ")


def test_a_name_of_bytes_that_are_no_utf8_is_written_and_quoted(run, llama, tmp_path):
    page, prompts = tmp_path / f"page{BYTE}.html", tmp_path / f"prompts{BYTE}.txt"
    prompts.write_text("def main\n")
    result = run("generate", "--bundle", llama.bundle, "--prompt-file", prompts, "--trace-html", page)
    assert (result.code, page.exists()) == (0, True)
    assert_refused(run("inspect", tmp_path / f"no{BYTE}"), r"no\udcff is not a directory")
    few = ("--max-new-tokens", 16, "--repeats", 1, "--draft-lengths", 1, "--prompts", prompts)
    assert run("bench", "--bundle", llama.bundle, *few, "--report", page).code == 0
    assert r"prompts\udcff.txt" in page.read_text()


def test_a_name_with_control_characters_is_quoted_on_one_line(run, tmp_path):
    name = f"{tmp_path}/a\nb\x1b[31m\u2028"
    assert_refused(run("inspect", name), r"/a\nb\x1b[31m\u2028 is not a directory")


@pytest.mark.parametrize(
    "command",
    [
        ("inspect", "x" * 5000),
        ("generate", "--bundle", "x" * 5000, "--prompt", "a"),
        ("ngram", "--bundle", "x" * 5000, "--text", __file__),
        ("plan", "--alpha", ".5", "--plot", f"{'x' * 5000}.svg"),
        ("doctor", "--target", "x" * 5000, "--draft", "y"),
    ],
)
def test_a_name_that_no_file_system_has_is_refused(run, command):
    assert_refused(run(*command), "(File name too long); ")


def test_the_root_is_no_file_to_write(run, llama):
    assert_refused(run("plan", "--alpha", ".5", "--plot", "/.svg/.."), "ends in '', expected .png or .svg")
    assert_refused(
        run("bench", "--bundle", llama.bundle, "--json", "/"), "output / is a directory, expected a file name"
    )


@pytest.mark.parametrize("size", ["100000000", "9" * 5000, str(LARGEST_BATCH + 1)])
def test_a_batch_that_would_take_all_memory_is_refused_at_once(run, llama, size):
    said = f"expected a whole number from 1 to {LARGEST_BATCH}; see"
    counted = said if len(size) < 18 else "expected a whole number >= 1; see"
    assert_refused(run("bench", "--bundle", llama.bundle, "--batch", size), counted)
    assert_refused(run("inspect", llama.bundle, "--batch", size), counted)
    assert_refused(run("tune", llama.bundle, "--batches", f"1,{size}"), f"from 1 to {LARGEST_BATCH} like 1,2,4; see")
    build = ("build", "--bundle", llama.bundle, "--engine", "tensorrt-rtx", "--compute-capability", "8.9")
    assert_refused(run(*build, "--batch", f"1..{size}"), f"and at most {LARGEST_BATCH}; see")


@pytest.mark.parametrize("command", [("bench", "--bundle"), ("tune",)])
def test_more_tokens_than_fit_are_refused_before_any_measuring(run, llama, command):
    result = run(*command, llama.bundle, "--max-new-tokens", 100_000_000)
    assert_refused(result, "max_new_tokens 100000000 exceed the bundle's limit of 256 by ")


def test_running_out_of_memory_is_said_in_a_sentence(run, llama, monkeypatch):
    errors = [
        MemoryError("Unable to allocate 7.28 TiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.\nmore"),
    ]
    for error in errors:

        def fail(self, error=error):
            raise error

        monkeypatch.setattr(Decoder, "step", fail)
        result = run("generate", "--bundle", llama.bundle, "--prompt", "abc")
        assert_refused(result, "this machine has not enough memory for it (")
        assert str(error).splitlines()[0] in result.err


def test_a_full_disk_is_said_in_a_sentence(capsys):
    def write():
        raise OSError(28, "No space left on device", "out.json")

    assert exit_code("figures", write) == 2
    assert capsys.readouterr().err == (
        "figures: error: out.json cannot be used (No space left on device); choose another place, or mend this one\n"
    )


@pytest.mark.parametrize("content", [NESTED, f'{{"format": {"9" * 5000}}}', "null"], ids=["nested", "digits", "null"])
def test_a_bundle_whose_files_are_no_sensible_json_is_refused(run, llama, tmp_path, content):
    shutil.copytree(llama.bundle, tmp_path / "bundle")
    (tmp_path / "bundle" / "manifest.json").write_text(content)
    assert_refused(run("inspect", tmp_path / "bundle"), "manifest.json ")


def test_a_record_of_a_check_that_says_nothing_is_refused(run, llama, tmp_path):
    shutil.copytree(llama.bundle, tmp_path / "bundle")
    bundle = Bundle.open(tmp_path / "bundle")
    damaged = replace(bundle.target, check={"worst_error": "x"})
    replace(bundle, models=bundle.models | {"target": damaged}).save()
    assert_refused(run("inspect", bundle.path), "the manifest's record of the check is {'worst_error': 'x'}; export")


def test_a_table_of_costs_or_a_result_that_nests_without_end_is_refused(run, llama, tmp_path, capfd):
    from trt_spec.runtime.lengths.costs import costs_file
    from trt_spec.tools.pages.bench_page import main

    shutil.copytree(llama.bundle, tmp_path / "bundle")
    costs = costs_file(tmp_path / "bundle", "onnxruntime", "cpu")
    costs.parent.mkdir()
    costs.write_text(NESTED)
    assert Bundle.open(tmp_path / "bundle")
    assert_refused(run("generate", "--bundle", tmp_path / "bundle", "--prompt", "a"), "is not a table of costs")
    (tmp_path / "result.json").write_text(NESTED)
    assert main([str(tmp_path / "result.json"), str(tmp_path / "out.html")]) == 2
    assert "is not a result of this version's bench (RecursionError: " in capfd.readouterr().err


def test_a_bug_of_ours_keeps_its_traceback():
    def fail():
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        exit_code("trt-spec", fail)


def test_everything_printed_is_json_that_can_be_read_whatever_the_bundle_is_called(run, llama, tmp_path):
    shutil.copytree(llama.bundle, tmp_path / f"{BYTE}")
    assert json.loads(run("inspect", tmp_path / f"{BYTE}", "--json").out)["path"].endswith(BYTE)
