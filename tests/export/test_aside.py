"""Whatever happens to an export, the older bundle or the new one is there, and nothing else for long."""

import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from trt_spec.engines import Bundle, ExportError
from trt_spec.export import ExportReport, export_bundle
from trt_spec.export.writing.aside import built_aside, disk_errors
from trt_spec.export.writing.graph import write_graph

from ..kit.machine_faults import running
from ..kit.models import tiny_llama
from .contents import contents

UNDER_WAY = """
import sys
from pathlib import Path
from trt_spec.export.writing.aside import built_aside

with built_aside(Path(sys.argv[1])) as folder:
    (folder / "half").touch()
    print("half", flush=True)
    sys.stdin.read()
"""
MOVED_AWAY = """
import os, signal, sys
from pathlib import Path
from trt_spec.export.writing import aside
from trt_spec.export.writing.aside import built_aside

aside.exchanged = lambda *folders: False  # as on other systems than Linux

def rename(self, to):
    os.rename(self, to)
    os.kill(os.getpid(), signal.SIGKILL)

with built_aside(Path(sys.argv[1])):
    Path.rename = rename
"""
EXCHANGED = """
import os, signal, sys
from pathlib import Path
from trt_spec.export.writing import aside

exchange = aside.exchanged
aside.exchanged = lambda *folders: exchange(*folders) and os.kill(os.getpid(), signal.SIGKILL)

with aside.built_aside(Path(sys.argv[1])) as folder:
    (folder / "new").touch()
"""


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.fixture
def bundle(exported: ExportReport, tmp_path: Path) -> Path:
    shutil.copytree(exported.path, tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.mark.usefixtures("shared_traces")
def test_what_a_killed_export_left_goes_with_the_next_one_to_the_same_place(tmp_path: Path) -> None:
    checkpoint = tiny_llama(tmp_path / "checkpoint", num_hidden_layers=1)
    command = [sys.executable, "-m", "trt_spec.tools.commands.export_models"]
    arguments = ["--target", checkpoint, "--out", tmp_path / "bundle"]
    with subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True, cwd="/") as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "tracing" in line:
                process.kill()
                break
    assert process.returncode == -signal.SIGKILL
    [partial] = tmp_path.glob(".bundle.partial-*")
    assert names(partial) == ["tokenizer.json"]
    export_bundle(checkpoint, tmp_path / "bundle", check=False)
    assert names(tmp_path) == ["bundle", "checkpoint"]
    Bundle.open(tmp_path / "bundle")


def test_what_a_live_export_is_building_stays_and_arrives(tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    with running(UNDER_WAY, out) as process:
        [partial] = tmp_path.glob(".bundle.partial-*")
        with built_aside(out):
            assert names(partial) == ["half"]
        process.communicate()
        assert process.returncode == 0
    assert names(tmp_path) == ["bundle"]
    assert names(out) == ["half"]


def test_a_bundle_that_a_killed_export_had_moved_away_is_moved_back_even_if_the_next_one_fails(
    bundle: Path, tmp_path: Path
) -> None:
    before = contents(bundle)
    done = subprocess.run([sys.executable, "-c", MOVED_AWAY, bundle], cwd="/")
    assert done.returncode == -signal.SIGKILL
    assert not bundle.exists()
    with pytest.raises(KeyboardInterrupt), built_aside(bundle):
        raise KeyboardInterrupt
    assert contents(bundle) == before
    assert names(tmp_path) == ["bundle"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets two folders change places")
def test_a_bundle_is_there_at_every_moment_of_being_replaced(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, built_aside(bundle) as folder:
        shutil.copytree(bundle, folder, dirs_exist_ok=True)
        patch.setattr(Path, "rename", None)
    done = subprocess.run([sys.executable, "-c", EXCHANGED, bundle], cwd="/")
    assert done.returncode == -signal.SIGKILL
    assert names(bundle) == ["new"]
    shutil.rmtree(bundle)
    with built_aside(bundle):
        pass
    assert names(tmp_path) == ["bundle"]


def test_existing_bundle_is_replaced_and_a_link_to_it_stays_a_link(bundle: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(bundle)
    with built_aside(link) as folder:
        shutil.copytree(bundle, folder, dirs_exist_ok=True)
        (folder / "new").touch()
        assert not (bundle / "new").exists()
    assert link.is_symlink()
    assert (bundle / "new").exists()
    assert names(tmp_path) == ["bundle", "link"]


def test_existing_bundle_comes_back_when_the_new_one_cannot_take_its_place(bundle: Path, tmp_path: Path) -> None:
    before = contents(bundle)
    with pytest.raises(OSError, match="No such file"), built_aside(bundle) as folder:
        shutil.rmtree(folder)
    assert contents(bundle) == before
    assert names(tmp_path) == ["bundle"]


def test_a_bundle_that_holds_the_checkpoint_is_not_replaced(bundle: Path) -> None:
    checkpoint = tiny_llama(bundle / "checkpoint")
    for target, draft in ((checkpoint, None), ("of another", checkpoint)):
        with pytest.raises(
            ExportError, match=r"bundle would be replaced, but .*checkpoint lies in it; choose another$"
        ):
            export_bundle(target, bundle, draft)
    assert (checkpoint / "config.json").exists()


def test_a_place_where_a_disk_is_mounted_is_refused() -> None:
    with pytest.raises(
        ExportError, match="is where a disk is mounted, which nothing can replace; choose a directory in"
    ):
        export_bundle("checkpoint", "/proc")


@pytest.mark.parametrize("content", ["notes.txt", "manifest.json"])
def test_directory_that_is_no_bundle_is_never_replaced(tmp_path: Path, content: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / content).write_text("{}")
    checkpoint = tiny_llama(tmp_path / "checkpoint")
    with pytest.raises(ExportError, match="holds other things than a bundle; choose a new directory or empty this"):
        export_bundle(checkpoint, tmp_path / "out")
    assert (tmp_path / "out" / content).read_text() == "{}"


def test_a_file_a_place_that_cannot_be_written_and_a_link_to_itself_are_refused_as_output(tmp_path: Path) -> None:
    checkpoint = tiny_llama(tmp_path / "checkpoint")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "link")
    with pytest.raises(ExportError, match="is a file, expected a new directory or a bundle to replace"):
        export_bundle(checkpoint, tmp_path / "file")
    for parent in ("file", "missing"):
        with pytest.raises(ExportError, match=r"cannot write in .* \((Not a directory|No such file or directory)\)"):
            export_bundle(checkpoint, tmp_path / parent / "bundle")
    with pytest.raises(ExportError, match="link is a link that leads to itself; choose another"):
        export_bundle(checkpoint, tmp_path / "link")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("room", [2**15, 2**16 + 1000], ids=["numpy says", "numpy says nothing of"])
def test_weights_that_a_full_disk_cuts_short_are_refused(room: int, tmp_path: Path) -> None:
    made = []
    for size in (2**14, 2**9):
        numbers = ir.Tensor(np.ones(size, np.float32), name=f"weight{size}")
        value = ir.Value(name=numbers.name, shape=numbers.shape, type=ir.TensorType(numbers.dtype), const_value=numbers)
        made.append(ir.node("Neg", [value]))
    weights = [value for node in made for value in node.inputs if value is not None]
    graph = ir.Graph([], [node.outputs[0] for node in made], nodes=made, initializers=weights)
    limit, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, most))
    try:
        with pytest.raises(ExportError, match=r"^cannot write bundle out: No space left on device"), disk_errors("out"):
            write_graph(ir.Model(graph, ir_version=10), tmp_path / "graph")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
