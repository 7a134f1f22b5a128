"""What users install: the wheel holds every module, and the runtime alone needs nothing of the exporter."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from .kit.bundles import Pair

ROOT = Path(__file__).parents[1]
FOLDERS = ("export", "runtime", "engines", "tools")
RESEARCH = Path("tools/research")  # stays in a clone
IMPORT_ALL = """
import os, sys
from importlib import import_module
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
for module in sys.argv[1:]:
    try:
        import_module(module)
    except ModuleNotFoundError as error:  # of a library that is not installed here
        if (error.name or "").startswith("trt_spec"):
            raise
print(Path(sys.modules["trt_spec"].__file__).parents[1])
"""
NOT_NEEDED = ("transformers", "onnx", "onnxscript", "tensorrt", "tensorrt_rtx")

pytestmark = [pytest.mark.wheel, pytest.mark.long, pytest.mark.xdist_group("wheel")]  # one worker builds it, once


def run(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, cwd="/", env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--outdir", out, ROOT)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that has the wheel with [cpu] and nothing else."""
    home = tmp_path_factory.mktemp("clean")
    run(sys.executable, "-m", "venv", home)
    run(home / "bin/pip", "install", "-q", "-c", ROOT / ".ci/constraints.txt", f"{wheel}[cpu]")
    return home / "bin"


def test_wheel_holds_every_module_and_no_other_top_level_name(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    files = [file.relative_to(ROOT) for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    modules = {f"trt_spec/{file}" for file in files if RESEARCH not in file.parents}
    assert modules - set(names) == set()
    assert not [one for one in names if one.startswith(f"trt_spec/{RESEARCH}")]
    models = {Path(one).parent.name for one in names if Path(one).name == "model.safetensors"}
    assert models == {"pycode-14m", "pycode-1m", "pycode-14m-pass"}
    assert wheel.stat().st_size < 27e6
    for other in ("prompts/chat.jsonl", "measuring/gpu_figures.json"):
        assert f"trt_spec/tools/{other}" in names
    assert "trt_spec/py.typed" in names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"trt_spec"}


def test_every_module_that_is_installed_imports_what_is_installed(wheel: Path, tmp_path: Path) -> None:
    """With all libraries, and nothing of ours but the wheel."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    modules = [
        ".".join(file.relative_to(tmp_path).with_suffix("").parts) for file in (tmp_path / "trt_spec").rglob("*.py")
    ]
    assert run(sys.executable, "-c", IMPORT_ALL, *modules, PYTHONPATH=str(tmp_path)).strip() == str(tmp_path)


def test_commands_and_runtime_import_in_a_clean_environment(clean: Path) -> None:
    assert "generate" in run(clean / "trt-spec", "--help")
    assert "--target" in run(clean / "export-models", "--help")
    run(clean / "python", "-c", "import trt_spec.runtime")


def test_a_shipped_head_that_is_not_in_the_wheel_is_refused_in_a_sentence(clean: Path) -> None:
    done = subprocess.run([clean / "trt-spec", "demo", "--drafter", "eagle3"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "in a clone of the repository and in no wheel" in done.stderr
    assert "say --drafter model or pass" in done.stderr


def test_runtime_runs_a_bundle_without_the_exporters_libraries(clean: Path, demo: Pair) -> None:
    probe = f"import importlib.util as u; print([n for n in {NOT_NEEDED!r} if u.find_spec(n)])"
    assert run(clean / "python", "-c", probe).strip() == "[]"
    command = ["generate", "--bundle", demo.bundle, "--prompt", "def f(", "--max-new-tokens", "8", "--json"]
    answer = json.loads(run(clean / "trt-spec", *command))
    assert len(answer["token_ids"]) == answer["usage"]["completion_tokens"] == 8


def test_exporting_without_the_extra_names_it(clean: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [clean / "export-models", "--target", ROOT / "tools/demo_pair/pycode-14m", "--out", tmp_path / "bundle"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "trt-spec[export]" in done.stderr
    assert not (tmp_path / "bundle").exists()
