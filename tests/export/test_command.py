"""The command `export-models`: its table, its exit codes, its one-line errors."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import onnx_ir as ir
import pytest
from trt_spec.engines import Bundle
from trt_spec.tools.commands import export_models
from trt_spec.tools.commands.export_models import main

from ..kit.models import YARN, tiny_llama

ROOT = Path(__file__).resolve().parent.parent.parent
MOMENTS = 6  # of each stage at which an export is interrupted
COMMAND = [sys.executable, "-m", "trt_spec.tools.commands.export_models"]
# What a shell starts in the background ignores interrupts, and so does all that it starts.
HEEDING_INTERRUPTS = (
    "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "runpy.run_module('trt_spec.tools.commands.export_models', run_name='__main__')"
)


def test_command_writes_a_bundle_and_prints_only_its_own_lines(tmp_path: Path) -> None:
    """In float16 and with scaled angles, so that the rotation's rewrite must see past casts and factors."""
    checkpoint = tiny_llama(tmp_path / "checkpoint", num_hidden_layers=1, rope_parameters=YARN)
    arguments = ["--target", str(checkpoint), "--out", str(tmp_path / "bundle"), "--max-length", "64"]
    arguments += ["--dtype", "float16"]
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    bundle = Bundle.open(tmp_path / "bundle")
    assert bundle.max_length == 64
    assert bundle.target.check["worst_error"] < 5e-5
    assert sum(node.op_type == "RotaryEmbedding" for node in ir.load(bundle.graph("target")).graph) == 2
    heading, row, copy, quality, last, then = done.stdout.splitlines()
    assert re.match(r"target on a text of 64 tokens: perplexity [\d.]+, of the checkpoint [\d.]+; KL ", quality)
    assert " ".join(heading.split()) == "model from parameters nodes size dtype weights worst error seconds"
    assert row.split()[:3] == ["target", "checkpoint", "16,480"]
    assert "float16" in row
    assert copy == "checked as float32 copy: the same weights file, computed in float32"
    assert last.startswith(f"{tmp_path / 'bundle'}: sequences up to 64 tokens, written in ")
    bundle_here = tmp_path / "bundle"
    serves = f"trt-spec serve {bundle_here} serves it"
    assert then == f"next: trt-spec bench --bundle {bundle_here} measures its speed here, {serves}"
    assert all(line.startswith("[") and " s] " in line for line in done.stderr.splitlines()), done.stderr


@pytest.mark.usefixtures("shared_traces")
def test_perplexity_and_acceptance_are_measured_on_the_text_that_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = str(tiny_llama(tmp_path / "checkpoint", num_hidden_layers=1))
    (tmp_path / "text").write_text("abc " * 10)
    arguments = ["--target", checkpoint, "--draft", checkpoint, "--out", str(tmp_path / "bundle")]
    assert main([*arguments, "--text", str(tmp_path / "text")]) == 0
    said = capsys.readouterr().out
    tokens = {Bundle.open(tmp_path / "bundle").target.check["quality"]["tokens"]}
    assert tokens == set(map(int, re.findall(r"on a text of (\d+) tokens", said)))
    assert tokens != {64}, "not the text that is taken without --text"
    assert "acceptance expected of the draft on the text: " in said

    (tmp_path / "text").write_bytes(b"abc\xff")
    for path, reason in ((tmp_path / "text", "is not UTF-8: byte 3 is 0xff"), (tmp_path / "none", "cannot be read")):
        assert main([*arguments, "--text", str(path)]) == 2
        assert reason in capsys.readouterr().err.splitlines()[-1]


def test_error_is_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--target", str(tmp_path / "missing"), "--out", str(tmp_path / "bundle")]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[")]
    assert len(lines) == 1
    assert lines[0].startswith("export-models: error: checkpoint ")


def test_a_flag_that_is_nearly_right_is_asked_about(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--target", "a", "--output", "bundle"])
    said = "unrecognized arguments: --output; did you mean --out?; see export-models --help"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--dtype", "int8"], ["--max-length", "many"], ["--frobnicate"], []])
def test_bad_flag_exits_with_2(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--out", "bundle", *flags])
    assert stopped.value.code == 2
    assert "export-models: error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sent", "code", "said"),
    [
        (signal.SIGINT, 130, "export-models: interrupted; nothing was left behind"),
        pytest.param(
            signal.SIGTERM,
            143,
            "export-models: terminated; nothing was left behind",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_signal_in_the_middle_leaves_nothing_behind(tmp_path: Path, sent: int, code: int, said: str) -> None:
    checkpoint = tiny_llama(tmp_path / "checkpoint")
    arguments = ["--target", str(checkpoint), "--out", str(tmp_path / "bundle")]
    command = [sys.executable, "-c", HEEDING_INTERRUPTS, *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd="/") as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "tracing" in line:
                os.kill(process.pid, sent)
                break
        rest = process.stderr.read().splitlines()
        assert process.wait() == code
    assert rest[-1] == said
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.exhaustive
def test_a_signal_at_any_moment_of_any_stage_ends_the_export_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """A bundle may be complete by then, which is said."""
    tiny_llama(tmp_path / "checkpoint", num_hidden_layers=1)
    (tmp_path / "made").mkdir()
    command = [sys.executable, "-m", "tests.export.interrupted_exports", str(tmp_path), str(MOMENTS)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    tried = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(tried) == MOMENTS * len({stage for stage, *_ in tried})
    ends = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated")}
    sent = [(*one, said) for *one, was_sent, said in tried if was_sent]
    assert len(sent) > len(tried) / 2, "some exports end before their moment comes"
    for stage, moment, number, code, there, said in sent:
        left = f"{tmp_path / 'made' / 'bundle'} was complete by then" if there else "nothing was left behind"
        found = (code, there in ([], ["bundle"]), said)
        assert found == (ends[number][0], True, [f"export-models: {ends[number][1]}; {left}"]), (stage, moment)


def test_missing_extra_is_named(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['onnxscript'] = None; "
        "from trt_spec.tools.commands.export_models import main; sys.exit(main())"
    )
    arguments = ["--target", "any", "--out", str(tmp_path / "bundle")]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd="/")
    assert done.returncode == 2
    expected = "checkpoints are read with onnxscript, which is not installed; pip install 'trt-spec[export]'"
    assert done.stderr.splitlines()[-1] == f"export-models: error: {expected}"


def test_help_needs_no_library() -> None:
    code = "import sys; from trt_spec.tools.commands.export_models import main; main(['--help'])"
    probe = f"import sys\ntry:\n    exec({code!r})\nexcept SystemExit:\n    print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, cwd="/")
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.usefixtures("shared_traces")
@pytest.mark.parametrize(
    "flags",
    [
        ["--no-check"],
        ["--weights", "int8"],
        ["--draft"],
        pytest.param(["--draft", "--draft", "--draft-weights", "int4"], marks=pytest.mark.exhaustive),
    ],
    ids=" ".join,
)
def test_the_bar_counts_all_stages_that_the_exporter_names(tmp_path: Path, flags: list[str]) -> None:
    checkpoint = str(tiny_llama(tmp_path / "checkpoint", num_hidden_layers=1, hidden_size=64, intermediate_size=64))
    flags = [word for flag in flags for word in ([flag, checkpoint] if flag == "--draft" else [flag])]
    arguments = ["--target", checkpoint, "--out", str(tmp_path / "bundle"), *flags]
    shown: list[str] = []

    @contextmanager
    def progress(name: str, total: int, ticking: bool) -> Iterator[Callable[[str], None]]:
        yield shown.append
        assert len(shown) == total, shown

    with patch.object(export_models, "progress", progress):
        assert main(arguments) == 0
    assert shown[0] == "loading the libraries"


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith("export-models 0.")
