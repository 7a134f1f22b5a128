import json
import os
import shutil
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


REFUSED = """
import json, sys
for heavy in ("rich", "httpx", "starlette", *sys.argv[2:]):
    sys.modules[heavy] = None  # to import it fails
from trt_spec.tools.cli import main
from trt_spec.tools.commands.export_models import main as export

for program, *words in json.loads(sys.argv[1]):
    try:
        code = export(words) if program == "export" else main([program, *words])
    except SystemExit as ended:  # of argparse
        code = ended.code
    assert code == 2, (program, words)
    loaded = sys.modules.keys() & {"torch", "transformers", "onnxruntime", "onnx", "openvino"}
    assert not loaded, (program, words, loaded)
"""
WRONG = {  # B is a bundle, C a checkpoint, F a file, D a folder without anything
    "serve ./nope": "./nope is neither a directory here nor a model's name",
    "serve D": "has no config.json, expected a checkpoint",
    "serve F --draft ./nope": "is neither a directory here nor",
    "serve B --bundle B": "both name the model; leave one out",
    "serve B --draft D": "--draft is for checkpoints, but a bundle is served",
    "serve B --reasoning-parser abacus": "--reasoning-parser is 'abacus', expected one of deepseek_r1",
    "serve B --controller entropy --draft-length 3": "leaves a controller nothing to choose",
    "serve B --stop-above 0.5": "--stop-above belongs to --controller entropy",
    "serve B --drafter abacus": "--drafter is 'abacus', expected one of model, common",
    "serve B --device abacus": "engine onnxruntime runs on the device cpu or cuda, not on 'abacus'",
    "doctor --target ./nope --draft D": "./nope is neither a directory here nor",
    "doctor --target D": "is not a bundle, and there is no --draft",
    "doctor --target D --draft D --text ./nope": "text nope cannot be read",
    "doctor --draft D": "name the --target as well",
    "doctor --target C --draft D": "has no config.json, expected a checkpoint",
    "doctor --target C --draft F": "is neither a directory here nor",
    "verify B --only checkpoint": "--only checkpoint needs --checkpoint DIR",
    "verify B --checkpoint D": "has no config.json, expected a checkpoint",
    "verify B --json D": "is a directory, expected a file name",
    "verify B --engine auto --draft-engine torch": "leave --draft-engine out",
    "bench --bundle B --prompts nope": "prompt file nope cannot be read",
    "bench --bundle B --prompts D": "cannot be read (Is a directory)",
    "bench --bundle B --plot a.jpg": "--plot a.jpg ends in '.jpg', expected .png or .svg",
    "bench --bundle B --plot nowhere/a.svg": "output nowhere/a.svg cannot be written (No such file",
    "bench --bundle B --json nowhere/a": "output nowhere/a cannot be written",
    "bench --bundle B --drafter none": "--drafter none proposes nothing",
    "bench --bundle B --drafter model+abacus": "--drafter is 'model+abacus', expected",
    "bench --bundle B --temperature -1": "temperature is -1.0, expected 0 or a number from",
    "tune B --top-p 2": "top_p is 2.0, expected a number in (0, 1]",
    "tune B --prompts nope": "prompt file nope cannot be read",
    "tune B --json nowhere/a": "output nowhere/a cannot be written",
    "generate --bundle B --prompt a --top-k -1": "top_k is -1, expected a whole number >= 0",
    "generate --bundle B --prompt a --num-beams 99": "num_beams is 99, expected a whole number from 1 to 32",
    "generate --bundle B --prompt a --num-beams 4 --temperature 1": "num_beams is 4, but beam search goes without temp",
    "generate --bundle B --prompt a --logit-bias 1=nan": "logit_bias is",
    "generate --bundle B --prompt a --draft-length 17": "--draft-length is 17, expected auto",
    "generate --bundle B --prompt a --trace-html D": "is a directory, expected a file name",
    "generate --bundle B --prompt a --system b": "--chat is missing; add it",
    "generate --bundle B --prompt a --chat --chat-template nope": "chat template nope cannot be read",
    "chat --bundle B --max-new-tokens 0": "max_new_tokens is 0, expected a whole number >= 1",
    "chat --bundle B --drafter abacus": "--drafter is 'abacus'",
    "chat --bundle B --drafter mixed --draft-length 4": "drafter mixed needs draft_length auto, not 4",
    "chat --bundle B --draft-length 99x99x99": "draft_length is 99x99x99, expected 1 to 16 levels, at most 4 children",
    "chat --bundle B --controller entropy --longest 17": "longest is 17, expected at most 16",
    "chat --bundle B --device cuda:x": "engine onnxruntime runs on the device cpu or cuda, not on 'cuda:x'",
    "train draft --target D --out O --prompts F --rank 2": "--rank is for pass and says nothing to draft",
    "train mtp --target D --out O --prompts F --cut 2": "--cut is for draft and says nothing to mtp; leave it out",
    "train draft --target D --out O --prompts F --hidden 100": "--hidden is 100, expected a multiple of 64",
    "train pass --target D --out O --prompts F --steps 0": "--steps is 0, expected at least 1",
    "train pass --target D --out O --prompts F --minutes 0": "--minutes is 0, expected more than 0",
    "train pass --target D --out O --prompts nope": "prompt file nope cannot be read",
    "train draft --target D --out O --prompts F": "has no config.json, expected a checkpoint",
    "train draft --target ./nope --out F --prompts F": "is a file, expected a new directory",
    "transcribe F --bundle B --temperature 1e9": "temperature is 1000000000.0, expected 0 or",
    "transcribe F --bundle B --draft-length -1": "--draft-length is -1",
    "bench --bundle B --compare hf": "name --target-checkpoint and --draft-checkpoint",
    "bench --bundle B --compare hf --drafter suffix": "--drafter is suffix, but --compare hf knows only",
    "bench --bundle B --compare hf --drafter lookup --target-checkpoint nope": "--target-checkpoint nope is not there",
    "bench --bundle B --compare hf --drafter lookup --target-checkpoint D": "has no config.json, expected a checkpoint",
    "bench --bundle B --compare hf --drafter lookup --target-checkpoint C --batch 2": "--batch is 2, but transformers",
    "bench --bundle B --compare openvino": "name --openvino-target and --openvino-draft",
    "bench --bundle B --compare openvino --drafter lookup --openvino-target D": "has no openvino_model.xml, expected",
    "bench --bundle B --compare openvino --drafter lookup --openvino-target D --temperature 1": "--temperature is 1,",
    "build --bundle B --engine tensorrt-rtx --compute-capability 99": "compute capability is '99', expected one",
    "build --bundle B --engine tensorrt-rtx --draft-length 99": "draft length is 99, expected 0 to 16",
    "build --bundle B --engine tensorrt-rtx --prefill-width 9999": "prefill width is 9999, expected",
    "demo --draft-length 17": "--draft-length is 17, expected a whole number from 1 to 16",
    "demo --temperature -1": "temperature is -1.0, expected 0 or",
    "serve B --host nowhere.invalid": "cannot listen on nowhere.invalid port 8000",
    "serve B --port 0 --host 192.0.2.1": "cannot listen on 192.0.2.1 port 0",
    "serve B --port 0 --max-length 999": "sequences of 999 tokens are asked for, the models allow",
    "serve B --port 0 --generation-config": "keeps no defaults of a generation_config.json",
    "serve C --port 0 --generation-config": "has no generation_config.json that recommends a sampling",
    "serve C --port 0 --max-length 999": "more than the 256 positions of",
    "serve C --port 0 --max-length 3": "a maximum length of 3 is too short, expected at least 32",
    "serve C --port 0 --draft D": "has no config.json, expected a checkpoint",
    "serve C --port 0 --drafter model": "--drafter model runs what --draft names, which is missing",
    "serve C --port 0 --draft a//b": "a//b is neither a directory here nor",
    "serve --port 0 --max-length 9999": "more than the 2048 positions of",
    "serve --max-length 0": "'0', expected a whole number >= 1",
    "serve B --metrics-port 70000": "'70000', expected a number from 0 to 65535",
    **{
        f"serve {name} --port 0": f"{name} is neither a directory here nor a model's name"
        for name in ("a//b", "a/b/c", "a/-b", "a..b/c", "a--b", "a/b.git", "a/b@")
    },
    "export --target a..b/c --out D": "a..b/c is neither a directory here nor",
    "export --target C --out D --draft ./nope": "./nope is neither a directory here nor",
    "export --target C --out D --draft a/.b": "a/.b is neither a directory here nor",
    "export --target C --out D --draft D": "has no config.json, expected a checkpoint",
    "export --target C --out D --draft F": "is neither a directory here nor",
    "export --target C --out F": "is a file, expected a new directory or a bundle to replace",
    "export --target C --out D --max-length 0": "'0', expected a whole number >= 1",
    "export --target C --out D --max-length -4": "'-4', expected a whole number >= 1",
    "export --target C --out D --max-length 999": "more than the 256 positions of",
    "export --target C --out D --text nope": "text nope cannot be read",
    "export --target C --out D --lora nope": "adapter nope does not exist, expected the folder of one",
    "export --target C --out D --draft-lora nope": "1 adapter for 0 drafts, expected one for each",
    "export --target C --out D --revision main": "--revision main is for models on the Hub",
    "export --target C --out D --dtype float8": "invalid choice: 'float8'",
    "export --target C --out D --weights int2": "invalid choice: 'int2'",
}


WRONG_FOR_THE_BUNDLE = {  # A is one of which a file is missing, K one that can keep no costs
    "tune K": "costs takes no files, and costs are kept there; give access, or copy the bundle",
    "generate --bundle A --prompt a": "lacks target/model.onnx; export it again or copy it whole",
    "verify A": "lacks target/model.onnx; export it again or copy it whole",
    "serve A --port 0": "lacks target/model.onnx; export it again or copy it whole",
    **{
        f"generate --bundle B --prompt a --drafter {name}": f"the bundle has no {what}"
        for name, what in {
            "eagle3": "eagle3 head",
            "model2": "draft2, which drafter model2 runs",
            "lookup+medusa": "medusa head",
            "common": "draft with tokens of its own, which drafter common runs",
            "pard": "draft that reads masks",
            "pass": "look-aheads of PaSS",
        }.items()
    },
    "generate --bundle B --prompt a --draft-length auto": "draft_length auto needs to know what rounds cost here",
    "generate --bundle B --prompt a --controller costs": "draft_length auto needs to know what rounds cost here",
    "generate --bundle B --prompt a --drafter mixed": "draft_length auto needs to know what rounds cost here",
    "generate --bundle B --prompt a --max-new-tokens 99999": "any prompt and max_new_tokens 99999 exceed the bundle's",
    "generate --bundle B --prompt a --logit-bias 99999=1": "logit_bias token id 99999 is outside the vocabulary of",
    "generate --bundle B --prompt a --stop-token-ids 99999": "stop_token_ids token id 99999 is outside the vocabulary",
    "generate --bundle B --prompt a --source b": "has no encoder that could read a source; leave it out",
    "generate --bundle B --prompt a --chat": "has no chat template; give one with --chat-template",
    "chat --bundle B": "has no chat template; give one with --chat-template",
    "chat --bundle B --chat-template F --drafter medusa": "the bundle has no medusa head",
    "chat --bundle B --chat-template F --allowed-token-ids 99999": "allowed_token_ids token id 99999 is outside",
    "bench --bundle B --drafter eagle3": "the bundle has no eagle3 head",
    "bench --bundle B --drafter mixed": "draft_length auto needs to know what rounds cost here",
    "bench --bundle B --draft-lengths auto": "draft_length auto needs to know what rounds cost here",
    "bench --bundle B --max-new-tokens 999": "any prompt and max_new_tokens 999 exceed the bundle's limit of 256 by",
    "tune B --max-new-tokens 999": "any prompt and max_new_tokens 999 exceed the bundle's limit of 256 by",
    "transcribe F --bundle B": "the bundle does not hear as Whisper does (no sound)",
    "serve B --port 0 --drafter eagle3": "the bundle has no eagle3 head",
    "serve B --port 0 --draft-length auto": "draft_length auto needs to know what rounds cost here",
}
WRONG_ONCE_TOKENISED = {
    "generate --bundle B --prompt EMPTY": "the prompt is empty; give at least one token",
    "generate --bundle B --prompt-file F": "tokens and max_new_tokens 128 exceed the bundle's limit of 256 by",
}


@pytest.mark.parametrize(
    ("wrong", "barred"),
    [({**WRONG, **WRONG_FOR_THE_BUNDLE}, ["tokenizers"]), (WRONG_ONCE_TOKENISED, [])],
    ids=["by flags, paths and the manifest", "by the tokenizer"],
)
def test_every_refusal_comes_before_anything_heavy_is_loaded(llama, tmp_path, wrong, barred):
    folder, cut, closed = tmp_path / "folder", tmp_path / "cut", tmp_path / "closed"
    folder.mkdir()
    for bundle in (cut, closed):
        shutil.copytree(llama.bundle, bundle)
    (cut / "target" / "model.onnx").unlink()
    (closed / "costs").touch()
    places = {"A": cut, "K": closed, "B": llama.bundle, "C": llama.checkpoint, "F": __file__, "D": folder, "EMPTY": ""}
    commands = [[str(places.get(word, word)) for word in words.split()] for words in wrong]
    done = python(REFUSED, json.dumps(commands), *barred, cwd=folder)
    lines = done.stderr.splitlines()
    assert done.returncode == 0, lines[-1]
    assert [(words, line) for words, line in zip(wrong, lines, strict=True) if wrong[words] not in line] == []
    assert list(folder.iterdir()) == []


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


def test_an_unexpected_exception_is_not_suppressed(run, llama, monkeypatch):
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
