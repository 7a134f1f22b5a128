import os
import signal
import subprocess
import sys

import pytest
from trt_spec.runtime import Decoder
from trt_spec.tools.cli import COMMANDS, main

from .conftest import assert_refused


def python(code: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, **options)


def test_help_names_every_command_and_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; from trt_spec.tools.cli import main; main(['--help'])"
    done = python(code)
    assert done.returncode == 0
    assert done.stderr == ""
    for command, summary in COMMANDS.items():
        assert f"{command:<11}{summary}" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run, command):
    result = run(command, "--help")
    assert result.code == 0
    assert f"usage: trt-spec {command}" in result.out


def test_version_is_the_packages(run):
    assert run("--version").out.startswith("trt-spec 0.")


def test_an_unknown_command_is_refused_with_the_known_ones(run):
    assert_refused(run("generte"), "invalid choice: 'generte' (choose from 'demo', 'generate', 'transcribe', 'serve', ")


WITHOUT_TORCH = """
import sys
for heavy in ("torch", "tokenizers", "rich"):
    sys.modules[heavy] = None  # to import it fails
from trt_spec.tools.cli import COMMANDS, main
from trt_spec.tools.commands.export_models import main as export

for command in COMMANDS:
    for words in (["--help"], ["--frobnicate"]):
        try:
            main([command, *words])
        except SystemExit as ended:
            assert ended.code == 2 * (words != ["--help"]), (command, words, ended.code)
absent = [
    ["generate", "--bundle", "nope", "--prompt", "a"],
    ["transcribe", "a.wav", "--bundle", "nope"],
    ["chat", "--bundle", "nope"],
    ["serve", "--bundle", "nope"],
    ["bench", "--bundle", "nope"],
    ["tune", "nope"],
    ["inspect", "nope"],
    ["build", "--bundle", "nope", "--engine", "tensorrt-rtx", "--compute-capability", "8.9"],
    ["ngram", "--bundle", "nope", "--text", sys.argv[1]],
    ["verify", "nope"],
]
for command in absent:
    assert main(command) == 2, command
for target in ("./nope", sys.argv[2]):
    assert export(["--target", target, "--out", f"{sys.argv[2]}/bundle"]) == 2
assert not {"transformers", "onnx", "onnxscript"} & sys.modules.keys()
"""


def test_flags_and_paths_are_read_and_refused_before_anything_heavy_is_loaded(tmp_path):
    done = python(WITHOUT_TORCH, __file__, str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    refused = [line for line in lines if "unrecognized arguments: --frobnicate; see" in line]
    assert len(refused) == len(COMMANDS)
    assert sum("bundle nope is not a directory; make one with export-models" in line for line in lines) == 10
    assert "./nope is neither a directory here nor a model's name" in lines[-2]
    assert "has no config.json, expected a checkpoint" in lines[-1]
    assert len(lines) == len(COMMANDS) + 12


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("generte",), "generate"),
        (("generate", "--promt", "a"), "--prompt"),
        (("generate", "--promt=a"), "--prompt"),
        (("inspect", "b", "--lenght", "3"), "--length"),
        (("bench", "--bundle", "b", "--engine", "onnxrntime"), "onnxruntime"),
    ],
)
def test_what_is_nearly_a_flag_or_a_command_is_asked_about(run, words, meant):
    assert_refused(run(*words), f"; did you mean {meant}?; see ")


def test_an_unknown_flag_is_told_before_a_missing_one(run):
    assert_refused(run("generate", "--frobnicate"), "unrecognized arguments: --frobnicate; see")


def test_what_has_spaces_is_no_flag(run):
    assert_refused(run("generate", "--bundle", "nope", "--prompt", "--a b"), "bundle nope is not a directory")


def test_no_command_is_refused(run):
    assert_refused(run(), "the following arguments are required: COMMAND; see trt-spec --help")


@pytest.mark.parametrize("command", ["demo", "bench", "doctor"])
def test_an_unknown_flag_is_refused_in_one_line(run, command):
    required = ["--bundle", "b"] if command == "bench" else []
    expected = f"unrecognized arguments: --frobnicate; see trt-spec {command} --help"
    assert_refused(run(command, *required, "--frobnicate"), expected)


def test_a_flag_may_not_be_abbreviated(run):
    assert_refused(run("generate", "--bundle", "b", "--prompt", "a", "--temp", "1"), "unrecognized arguments: --temp;")


def test_an_unexpected_exception_is_not_swallowed(run, llama, monkeypatch):
    def fail(self):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Decoder, "step", fail)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        run("generate", "--bundle", llama.bundle, "--prompt", "abc")


INTERRUPTED = """
import os, signal, sys
from trt_spec.runtime import Decoder
from trt_spec.tools.cli import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
number, step, steps = int(sys.argv.pop(1)), Decoder.step, []

def step_until_the_signal(self):
    steps.append(step(self))
    if len(steps) == 3:
        os.kill(os.getpid(), number)
    return True

Decoder.step = step_until_the_signal
sys.exit(main(sys.argv[1:]))
"""


def test_ctrl_c_while_decoding_ends_with_130_and_one_line(llama):
    command = ["generate", "--bundle", str(llama.bundle), "--prompt", "abc", "--stream", "--ignore-eos"]
    done = python(INTERRUPTED, str(int(signal.SIGINT)), *command)
    assert done.returncode == 130
    assert done.stderr == "trt-spec: interrupted\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_bench_leaves_no_file(llama, tmp_path, number, code):
    command = ["bench", "--bundle", str(llama.bundle), "--json", str(tmp_path / "result.json")]
    assert python(INTERRUPTED, str(int(number)), *command).returncode == code
    assert list(tmp_path.iterdir()) == []


def test_a_closed_pipe_ends_the_command_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    code = "import sys; sys.modules['torch'] = None; from trt_spec.tools.cli import main; sys.exit(main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.returncode == 141
    assert done.stderr == ""


def test_main_gives_the_signal_handler_back(capfd):
    before = signal.getsignal(signal.SIGTERM)
    main(["doctor", "--json"])
    assert signal.getsignal(signal.SIGTERM) is before
