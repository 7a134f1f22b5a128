"""The lowest versions that pyproject allows work together: in an environment of their own, by hand."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Extras.
RUN = ("cpu", "torch", "openvino", "export", "serve", "images", "otel", "report", "grammar", "compare", "test")
NOT_RUN = {
    "cuda": "the same module as that of cpu, whose build of this version runs in its place",
    "tensorrt": "needs a GPU",
    "tensorrt-rtx": "gigabytes that only compile here; CI has the one version that there is",
    "dynamo": "in an environment of its own, by the tests marked replicas",
    "docs": "in an environment of its own, by the tests marked wheel",
}
SMOKE = (
    "tests/engines/test_onnxruntime.py",
    "tests/engines/test_torch_engine.py",
    "tests/runtime/test_greedy.py",
    "tests/export/test_command.py",
    "tests/tools/commands/test_generate.py",
    "tests/tools/commands/test_inspect.py",
    "tests/tools/serving/test_completions.py",
)


def requirements(*extras: str) -> Iterator[Requirement]:
    """Yield what the package itself and these extras need."""
    given = [*PROJECT["dependencies"], *(one for extra in extras for one in PROJECT["optional-dependencies"][extra])]
    yield from (one for one in map(Requirement, given) if one.name != PROJECT["name"])


def lowest(one: Requirement) -> str:
    [bound] = one.specifier
    return f"{one.name}=={bound.version}"


def test_each_requirement_has_one_lower_bound_which_is_run_or_said_why_not() -> None:
    extras = PROJECT["optional-dependencies"]
    assert {*RUN, *NOT_RUN} == set(extras)
    assert not set(RUN) & set(NOT_RUN)
    bounds: dict[str, str] = {}
    for one in requirements(*extras):
        assert [bound.operator in (">=", "==") for bound in one.specifier] == [True], one
        assert bounds.setdefault(one.name, lowest(one)) == lowest(one), "the same in all extras"


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that has the lowest versions."""
    home = tmp_path_factory.mktemp("oldest")
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    install(home / "bin", *dict.fromkeys(map(lowest, requirements(*RUN))))
    install(home / "bin", "--no-deps", "--editable", str(ROOT))
    return home / "bin"


def install(folder: Path, *what: str) -> None:
    done = subprocess.run([folder / "pip", "install", "-q", *what], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def assert_smoke_passes(folder: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [folder / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *SMOKE],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


@pytest.mark.bounds
@pytest.mark.long
def test_the_lowest_versions_work_together(oldest: Path) -> None:
    assert_smoke_passes(oldest)


@pytest.mark.bounds
@pytest.mark.long
def test_the_lowest_onnxruntime_for_cuda_works_on_the_cpu(oldest: Path) -> None:
    [cuda] = (one for one in requirements("cuda") if one.name == "onnxruntime-gpu")
    [bound] = cuda.specifier
    install(oldest, f"onnxruntime=={bound.version}")
    assert_smoke_passes(oldest)
