"""Folders import one way only, heavy libraries late, and nothing that runs what a checkpoint brings along."""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("engines", "export", "runtime", "tools")
MAY_IMPORT = {
    "engines": set(),
    "export": {"engines"},
    "runtime": {"engines"},
    "tools": {"engines", "export", "runtime"},
}
# Within a folder: what each room, a file or a folder of its own, may import beside itself. The folder's __init__.py is
# its face, which may import all of them and which none of them imports.
ROOMS: dict[str, dict[str, set[str]]] = {
    "engines": {
        "errors": set(),
        "cores": set(),
        "cache_folder": set(),
        "onnx_types": set(),
        "symbols": set(),
        "contract": {"errors"},
        "bundle": {"contract", "errors"},
        "engine": {"contract"},
        "steps": {"engine", "contract"},
        "recurrence": {"engine", "contract"},
        "onnxruntime": {"engine", "bundle", "contract", "onnx_types", "cores", "errors"},
        "openvino": {"engine", "bundle", "contract", "cores", "errors"},
        "tensorrt": {"steps", "engine", "bundle", "contract", "errors"},
        "torch": {"engine", "bundle", "cache_folder", "contract", "onnx_types", "errors"},
        "table": {"engine", "contract", "errors"},
    },
    # Seven floors: the pipeline; writing, kinds and foreign; checkpoints; special and sources; families and checking;
    # tracing and quantised; passes and parallel.
    "export": {
        "passes": set(),
        "parallel": set(),
        "quantised": {"passes"},
        "plans": {"passes"},
        "tracing": {"passes"},
        "families": {"tracing"},
        "checking": {"tracing", "passes"},
        "special": {"families", "tracing"},
        "sources": {"families", "checking", "tracing"},
        "seeing": {"checking", "tracing"},
        "checkpoints": {"special", "sources", "families", "quantised"},
        "kinds": {"checkpoints", "checking", "families", "quantised", "tracing"},
        "foreign": {"checkpoints", "checking"},
        "writing": {"checkpoints", "special", "sources", "seeing", "tracing", "passes"},
        "pipeline": {"parallel", "writing", "kinds", "foreign", "checkpoints", "sources", "checking", "passes"},
    },
    # Seven floors: the decoder, scheduling, round and lengths, drafters and requests, acceptance, state, the rest.
    "runtime": {
        "grammars": set(),
        "images": set(),
        "memory": set(),
        "sources": {"memory"},
        "translation": set(),
        "state": {"memory"},
        "acceptance": {"state", "grammars"},
        "requests": {"acceptance", "state", "memory", "grammars", "sources"},
        "drafters": {"acceptance", "state", "memory", "translation"},
        "beams": {"drafters", "requests", "acceptance", "state", "memory"},
        "lengths": {"drafters", "requests", "acceptance", "state"},
        "round": {"drafters", "requests", "acceptance", "state"},
        "scheduling": {
            "round",
            "beams",
            "lengths",
            "drafters",
            "requests",
            "acceptance",
            "state",
            "memory",
            "grammars",
            "images",
            "sources",
        },
        "transcribing": {"sources", "requests", "acceptance", "state"},
        "decoder": {
            "scheduling",
            "beams",
            "lengths",
            "drafters",
            "requests",
            "acceptance",
            "state",
            "memory",
            "grammars",
            "images",
            "sources",
        },
    },
    # Seven floors: what stands alone, the console, the server and the certificate, flags, pages, measuring, commands.
    "tools": {
        "example_sources": set(),
        "extras": set(),
        "in_words": set(),
        "interruption": set(),
        "machine": set(),
        "output_json": set(),
        "sound_files": set(),
        "text_files": set(),
        "theory": set(),
        "trace_lines": set(),
        "training_settings": set(),
        "transcripts": set(),
        "whole_file": set(),
        "console": {"interruption"},
        "drawable": {"extras"},
        "ink": {"trace_lines"},
        "prompts": {"text_files"},
        "settings": {"text_files"},
        "certificate": {"prompts", "example_sources"},
        "program": {"settings", "extras", "interruption"},
        "serving": {"console", "sound_files", "text_files", "transcripts"},
        "examples": {"serving"},
        "exported": {"console"},
        "flags": {
            "certificate",
            "serving",
            "console",
            "drawable",
            "prompts",
            "extras",
            "text_files",
            "training_settings",
            "whole_file",
        },
        "making": {"program", "serving", "console", "extras", "text_files", "training_settings"},
        "timing": {"certificate"},
        "cli": {"flags", "program"},
        "dynamo": {"flags", "program", "serving", "extras"},
        "pages": {
            "timing",
            "program",
            "console",
            "drawable",
            "in_words",
            "text_files",
            "theory",
            "trace_lines",
            "whole_file",
        },
        "peers": {"flags", "timing", "extras"},
        "measuring": {
            "pages",
            "peers",
            "flags",
            "making",
            "timing",
            "certificate",
            "program",
            "console",
            "drawable",
            "prompts",
            "extras",
            "in_words",
            "interruption",
            "machine",
            "theory",
            "whole_file",
        },
        "commands": {
            "measuring",
            "pages",
            "flags",
            "making",
            "timing",
            "certificate",
            "program",
            "serving",
            "console",
            "drawable",
            "ink",
            "prompts",
            "example_sources",
            "exported",
            "extras",
            "in_words",
            "machine",
            "output_json",
            "sound_files",
            "text_files",
            "theory",
            "trace_lines",
            "training_settings",
            "transcripts",
            "whole_file",
        },
        "research": {
            "measuring",
            "pages",
            "peers",
            "flags",
            "making",
            "timing",
            "program",
            "console",
            "prompts",
            "example_sources",
            "extras",
            "sound_files",
            "theory",
            "training_settings",
            "whole_file",
        },
    },
}
FACE = "__init__"
RESEARCH = ROOT / "tools" / "research"
FILES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
# Rooms that the rest runs without, and the files that may import them, inside functions alone.
OPTIONAL = {
    "peers": {"tools/measuring/bench.py", "tools/measuring/gpu_parts.py"},
    "dynamo": set(),  # a program of its own
}
EXPORT_ONLY = {"transformers", "onnx", "onnxscript", "onnx_ir"}
READS_GRAPHS = "engines/torch/onnx_graph.py"
# These import their library, and are themselves imported inside a function only.
KERNELS = {str(file.relative_to(ROOT)) for file in FILES if file.parent.name == "on_gpu" and file.stem != FACE}
LOADED_LATE = {"engines/openvino/graph.py", "engines/openvino/operators.py", "tools/serving/tracing.py", *KERNELS}
ENGINE_LIBRARIES = {
    "onnxruntime",
    "tensorrt",
    "tensorrt_rtx",
    "tensorrt_lean",
    "polygraphy",
    "openvino",
    "openvino_genai",
    "triton",
    "opentelemetry",
}


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def imports(file: Path, everywhere: bool = True) -> list[str]:
    """Absolute names of all modules a file imports; `everywhere` includes imports inside functions."""
    package = ["trt_spec", *file.relative_to(ROOT).parent.parts]
    found: list[str] = []
    for node in ast.walk(parsed(file)) if everywhere else module_level(parsed(file)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [module] if node.module else [f"{module}.{alias.name}" for alias in node.names]
    return found


def module_level(tree: ast.Module) -> Iterator[ast.AST]:
    """Everything that runs on import: not the bodies of functions, nor what only a type checker reads."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
            continue
        todo += ast.iter_child_nodes(node)


def name(file: Path) -> str:
    return str(file.relative_to(ROOT))


def room_of(file: Path) -> str:
    """The name of the room of its folder in which a file stands."""
    return file.relative_to(ROOT).parts[1].removesuffix(".py")


def test_the_folders_hold_code():
    assert {file.relative_to(ROOT).parts[0] for file in FILES} == set(FOLDERS)


def test_a_folder_imports_only_those_below_it():
    for file in FILES:
        folder = file.relative_to(ROOT).parts[0]
        for module in imports(file):
            parts = module.split(".")
            assert parts[0] not in FOLDERS, f"{name(file)}: {module}: across folders import relatively"
            if parts[0] == "trt_spec" and len(parts) > 1:
                assert parts[1] == folder or parts[1] in MAY_IMPORT[folder], f"{name(file)} may not import {module}"


@pytest.mark.parametrize("room", OPTIONAL)
def test_a_room_that_is_optional_is_imported_where_it_is_asked_for_alone(room: str):
    place = f"trt_spec.tools.{room}"
    others = [file for file in FILES if RESEARCH not in file.parents and (ROOT / "tools" / room) not in file.parents]
    found = {name(file) for file in others if any(module.startswith(place) for module in imports(file))}
    assert found == OPTIONAL[room]
    for file in map(ROOT.joinpath, found):
        assert not [module for module in imports(file, everywhere=False) if module.startswith(place)]


@pytest.mark.parametrize("folder", ROOMS)
def test_the_rooms_of_a_folder_are_those_of_its_table_and_import_in_no_circle(folder: str):
    found = {room_of(file) for file in FILES if file.relative_to(ROOT).parts[0] == folder}
    assert found - {FACE} == set(ROOMS[folder])
    assert set().union(*ROOMS[folder].values()) <= found
    TopologicalSorter(ROOMS[folder]).prepare()  # raises CycleError, which names the circle


@pytest.mark.parametrize("folder", ROOMS)
def test_a_folder_has_at_most_seven_floors(folder: str):
    def floor(room: str) -> int:
        return 1 + max(map(floor, ROOMS[folder][room]), default=0)

    assert max(map(floor, ROOMS[folder])) <= 7


@pytest.mark.parametrize("folder", ROOMS)
def test_no_files_import_one_another_in_a_circle(folder: str):
    files = {".".join(["trt_spec", *file.relative_to(ROOT).with_suffix("").parts]): file for file in FILES}
    graph = {
        module: set(imports(file)) & files.keys()
        for module, file in files.items()
        if module.startswith(f"trt_spec.{folder}.")
    }
    assert any(graph.values())
    TopologicalSorter(graph).prepare()


def test_a_room_imports_only_those_below_it():
    """Imports inside functions and those for a type checker alone are included."""
    for file in FILES:
        folder, room = file.relative_to(ROOT).parts[0], room_of(file)
        for module in imports(file) if room != FACE else []:
            package, *parts = module.split(".")
            if package == "trt_spec" and parts[0] == folder:
                other = parts[1] if len(parts) > 1 else FACE
                assert other == room or other in ROOMS[folder][room], f"{name(file)} may not import {module}"


def libraries(file: Path, everywhere: bool = True) -> set[str]:
    return {module.split(".")[0] for module in imports(file, everywhere)}


def test_a_service_needs_nothing_of_the_exporter():
    """But for the engine that reads the graph file itself, and only when that one is opened."""
    found = {name(file): libraries(file) & EXPORT_ONLY for file in FILES if name(file)[:7] in ("runtime", "engines")}
    assert {file: needed for file, needed in found.items() if needed} == {READS_GRAPHS: {"onnx"}}
    assert not libraries(ROOT / READS_GRAPHS, everywhere=False) & EXPORT_ONLY


def test_libraries_of_engines_and_traces_are_imported_when_one_is_opened():
    late = {"trt_spec." + file.removesuffix(".py").replace("/", ".") for file in LOADED_LATE}
    for file in FILES:
        if file.relative_to(ROOT).parts[0] != "export" and name(file) not in LOADED_LATE:
            assert not libraries(file, everywhere=False) & ENGINE_LIBRARIES, name(file)
            assert not late.intersection(imports(file, everywhere=False)), name(file)


def test_nothing_unpickles_or_runs_code_that_came_with_a_checkpoint():
    for file in FILES:
        assert not libraries(file) & {"pickle", "dill", "cloudpickle", "joblib"}, name(file)
        assert "trust_remote_code=True" not in file.read_text(encoding="utf-8").replace(" ", ""), name(file)
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.Call) and (called := ast.unparse(node.func)) in ("eval", "exec", "torch.load"):
                assert called == "torch.load", f"{called} at {name(file)}:{node.lineno}"
                assert any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in node.keywords)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_second_copy_can_be_imported(folder: str):
    assert importlib.util.find_spec(f"trt_spec.{folder}") is not None
    assert importlib.util.find_spec(folder) is None, f"import {folder} would find {sys.path}"


def test_no_test_module_is_imported_by_another():
    """What several share is in tests/kit, or in a conftest.py."""
    for file in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                parts = [part for alias in node.names for part in alias.name.split(".")]
                parts += (getattr(node, "module", None) or "").split(".")
                found = any(part.startswith("test_") for part in parts)
                assert not found, f"{name(file)}:{node.lineno}: {ast.unparse(node)}"


def test_every_module_opens_with_one_sentence():
    for file in FILES:
        docstring = ast.get_docstring(parsed(file))
        assert docstring or not file.read_text().strip(), f"{name(file)} does not say what it is"
