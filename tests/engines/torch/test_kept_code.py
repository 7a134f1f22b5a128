"""What torch's compiler makes is kept in the user's cache, and read only if it is whole and nobody else's."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from trt_spec.engines.torch import kept_code
from trt_spec.engines.torch.kept_code import PLACES, KeptCode

from ...kit.bundles import export_pair
from ...kit.models import tiny_llama

CODE = b"\x7fELF" * 1000


@pytest.fixture
def graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in PLACES:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "model.onnx").write_bytes(b"a graph")
    return tmp_path / "model.onnx"


def compile_into(kept: KeptCode, name: str, code: bytes = CODE) -> None:
    with kept.in_place():
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"], name[:2])
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(code)
    kept.keep()


def found_in(kept: KeptCode) -> dict[str, bytes]:
    """What torch finds."""
    with kept.in_place():
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        return {file.name: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_what_one_process_has_compiled_the_next_finds(graph: Path) -> None:
    compile_into(KeptCode(graph), "code.so")
    assert found_in(KeptCode(graph)) == {"code.so": CODE}
    assert not PLACES.keys() & set(os.environ), "torch looks elsewhere for other code"


def test_two_processes_that_compile_at_the_same_time_keep_what_both_have_made(graph: Path) -> None:
    one, other = KeptCode(graph), KeptCode(graph)
    for kept in (one, other):
        assert not found_in(kept)
    compile_into(one, "one.so")
    compile_into(other, "other.so")
    assert set(found_in(KeptCode(graph))) == {"one.so", "other.so"}


def test_nothing_is_written_where_nothing_was_compiled(graph: Path) -> None:
    kept = KeptCode(graph)
    compile_into(kept, "code.so")
    before = kept.file.stat().st_ino
    again = KeptCode(graph)
    assert found_in(again)
    again.keep()
    assert kept.file.stat().st_ino == before


@pytest.mark.parametrize("place", [0, 40, -1])
def test_a_damaged_file_is_not_read_and_made_anew(graph: Path, place: int) -> None:
    kept = KeptCode(graph)
    compile_into(kept, "code.so")
    content = bytearray(kept.file.read_bytes())
    content[place] ^= 1
    kept.file.write_bytes(content)
    again = KeptCode(graph)
    assert not found_in(again)
    compile_into(again, "new.so")
    assert found_in(KeptCode(graph)) == {"new.so": CODE}


@pytest.mark.parametrize("of", ["file", "folder"])
def test_a_file_that_others_may_write_is_not_read(graph: Path, of: str) -> None:
    kept = KeptCode(graph)
    compile_into(kept, "code.so")
    assert kept.file.parent.stat().st_mode & 0o777 == 0o700
    (kept.file if of == "file" else kept.file.parent).chmod(0o777)
    assert not found_in(KeptCode(graph))


def test_a_file_of_another_user_is_not_read(graph: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_into(KeptCode(graph), "code.so")
    monkeypatch.setattr(kept_code, "ROOT", -1)
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    assert not found_in(KeptCode(graph))


def test_without_a_cache_to_write_to_nothing_is_kept_and_nothing_fails(
    graph: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (graph.parent / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(graph.parent / "file"))
    kept = KeptCode(graph)
    compile_into(kept, "code.so")
    assert set(found_in(kept)) == {"code.so"}
    assert not kept.file.exists()


@pytest.mark.parametrize("other", ["graph", "torch", "processor"])
def test_code_for_another_graph_version_of_torch_or_processor_is_not_taken(
    graph: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    compile_into(KeptCode(graph), "code.so")
    if other == "graph":
        graph.write_bytes(b"another")
    elif other == "torch":
        monkeypatch.setattr(torch, "__version__", "2.99.0")
    else:
        monkeypatch.setattr(kept_code, "_processor", lambda: "flags: none")
    assert not found_in(KeptCode(graph))


START = """
import json, sys
from pathlib import Path
import torch
from torch._dynamo.utils import counters
from torch._inductor import cpp_builder
from trt_spec.engines import Bundle, blank_cache, blank_step, open_engine

built, build = [], cpp_builder.CppBuilder.build
cpp_builder.CppBuilder.build = lambda self: (built.append(self), build(self))[1]
bundle = Bundle.open(sys.argv[1])
engine = open_engine("torch-compiled", bundle.graph("target"), bundle.target.contract)
step = blank_step(engine, blank_cache(engine.contract, 1, 16), 0, 1, 2, 2)
step.input_ids.copy_(torch.tensor([[3, 4]]))
logits = []
for _ in range(3):
    step.run()
    logits.append(step.logits.flatten().tolist())
engine.close()
print(json.dumps({"logits": logits, "libraries": len(built), **counters["inductor"]}))
"""


def start(bundle: Path, **environment: str) -> dict[str, Any]:
    """Run three steps in a process of its own, of which the second is compiled."""
    done = subprocess.run(
        [sys.executable, "-c", START, str(bundle)], env=os.environ | environment, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.exhaustive
@pytest.mark.long
def test_a_second_start_compiles_nothing_and_each_form_of_region_is_compiled_once(tmp_path: Path) -> None:
    """Four layers: the first with what comes before, three of one form, and what follows them."""
    bundle = export_pair(tiny_llama(tmp_path / "checkpoint", num_hidden_layers=4), tmp_path / "bundle").bundle
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    first, second = start(bundle, **cache), start(bundle, **cache)
    assert first["fxgraph_cache_miss"] == 3
    assert first["libraries"] > 3
    assert second["fxgraph_cache_hit"] == 3
    assert "fxgraph_cache_miss" not in second
    assert second["libraries"] == 0
    eager, *compiled = second["logits"]
    assert compiled == first["logits"][1:]
    torch.testing.assert_close(torch.tensor(eager), torch.tensor(compiled[0]), atol=1e-4, rtol=0)
