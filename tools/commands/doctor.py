"""Show what this machine can run, what is missing, and how to get it. The exit code is 1 if no engine can run.

With --target and --draft it compares two checkpoints instead, before anything is exported: whether they fit together,
how often they would agree, and what speed-up that promises. --target BUNDLE does so for the two models of a bundle.
"""

import argparse
import json
import platform
from importlib import import_module
from pathlib import Path
from typing import Any

from ...engines import ENGINES, PairError, RequestError
from ...engines.bundle.manifest import read_manifest
from ...engines.errors import counted
from ..console import in_bytes, progress, table
from ..extras import PACKAGE, install_command, installed, requirements
from ..machine import machine
from ..text_files import read_text

CUDA = "CUDAExecutionProvider"
PURPOSES = {
    "cpu": "run bundles in ONNX Runtime",
    "cuda": "run bundles in ONNX Runtime on an NVIDIA GPU, instead of cpu (--device cuda)",
    "openvino": "run bundles in OpenVINO, faster at prompts and batches (--engine openvino)",
    "torch": "run bundles in torch, on the CPU or a GPU (--engine torch)",
    "export": "make bundles (export-models, demo)",
    "tensorrt": "compile TensorRT plans on the GPU that runs them (trt-spec build, then --engine tensorrt)",
    "tensorrt-rtx": "compile plans of TensorRT for RTX with no GPU, and run them on one",
    "serve": "answer clients by OpenAI's API (serve)",
    "images": "read the images of prompts (serve, generate, chat)",
    "otel": "trace requests by OpenTelemetry (serve)",
    "dynamo": "serve on several machines, by NVIDIA Dynamo (tools.dynamo.worker)",
    "report": "draw charts and pages of them (bench --report and --plot, plan --plot)",
    "grammar": "confine outputs to JSON schemas and other grammars (generate --json-schema)",
    "compare": "measure OpenVINO GenAI in turn with this (bench --compare openvino)",
    "docs": "build the site of the documentation (tools.research.site, in a clone)",
    "test": "run the project's tests",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--target", metavar="DIR_OR_ID", help="a checkpoint, or a bundle that holds a draft")
    parser.add_argument(
        "--draft",
        metavar="DIR_OR_ID",
        help="the checkpoint that would draft for it; in a bundle of several drafts, which one: draft2 and so on",
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="compare the two on this text (default: a short one that is shipped)"
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.target or arguments.draft or arguments.text:
        return _run_pair(arguments)
    found = examine()
    print(json.dumps(found) if arguments.json else _report(found))
    return 0 if any(engine["runs"] for engine in found["engines"]) else 1


def _run_pair(arguments: argparse.Namespace) -> int:
    """Import what it needs here, because the rest of doctor must work where that is missing, and refuse before that."""
    if not arguments.target:
        raise RequestError("--draft and --text compare a draft with a target; name the --target as well")
    text = None if arguments.text is None else read_text(arguments.text, "text")
    _refuse_absent(arguments.target, arguments.draft)
    from ..measuring.pair_fit import examine_pair, report

    with progress("doctor", ticking=True) as show:
        found = examine_pair(arguments.target, arguments.draft, text, show)
    print(json.dumps(found) if arguments.json else report(found))
    return 0


def _refuse_absent(target: str, draft: str | None) -> None:
    if (Path(target) / "manifest.json").exists():
        read_manifest(Path(target))
    elif draft is None:
        raise PairError(f"{target} is not a bundle, and there is no --draft; name the checkpoint of a draft")
    else:
        from ...export.checkpoints.finding import require_pair_found

        require_pair_found(target, [draft], None)


def examine() -> dict[str, Any]:
    packages = requirements()
    return {
        "trt-spec": installed(PACKAGE),
        "python": platform.python_version(),
        "packages": {name: installed(name) for name in packages[None]},
        **machine(),
        "engines": [
            _engine(kind.name, device, library)
            for kind in ENGINES.values()
            for device in kind.devices
            for library in kind.libraries
        ],
        "extras": [_extra(name, needed) for name, needed in packages.items() if name is not None],
    }


def _engine(name: str, device: str, library: str) -> dict[str, Any]:
    """Load the engine, because being installed is not enough, and say whether it runs."""
    reason = None
    try:
        torch, loaded = import_module("torch"), import_module(library)
        if device == "cuda" and not torch.cuda.is_available():
            reason = "torch finds no GPU that it can use"
        elif (name, device) == ("onnxruntime", "cuda") and CUDA not in loaded.get_available_providers():
            reason = "the onnxruntime package here is the one without CUDA"
        elif (name, device) == ("torch-compiled", "cpu") and not _has_compiler():
            reason = "there is no C++ compiler that works; install g++, or name one in the variable CXX"
    except (ImportError, OSError) as error:
        reason = f"{type(error).__name__}: {error}"
    return {"name": name, "device": device, "library": library, "runs": reason is None, "reason": reason}


def _has_compiler() -> bool:
    try:
        import_module("torch._inductor.cpp_builder").get_cpp_compiler()
    except RuntimeError:
        return False
    return True


def _extra(name: str, needed: list[str]) -> dict[str, Any]:
    packages = {package: installed(package) for package in needed}
    complete = all(packages.values())
    return {
        "name": name,
        "purpose": PURPOSES[name],
        "packages": packages,
        "complete": complete,
        "install": None if complete else install_command(name),
    }


def _report(found: dict[str, Any]) -> str:
    cpu, memory = found["cpu"], found["memory"]
    packages = ", ".join(f"{name} {version or 'MISSING'}" for name, version in found["packages"].items())
    total, available = (in_bytes(memory[f"{kind}_bytes"] or 0) for kind in ("total", "available"))
    engines = [_engine_line(engine) for engine in found["engines"]]
    extras = [
        (extra["name"], "complete" if extra["complete"] else extra["install"], extra["purpose"])
        for extra in found["extras"]
    ]
    return "\n".join(
        [
            f"trt-spec {found['trt-spec']}, Python {found['python']}, {packages}",
            f"CPU: {cpu['model']}, {counted(cpu['cores'], 'core')}, "
            f"{' '.join(cpu['features']) or 'no vector features found'}",
            f"memory: {total}, {available} of it free",
            f"GPU: {', '.join(found['gpus']) or 'none found'}",
            "",
            "engines",
            *(f"  {line}" for line in engines),
            "",
            "extras",
            table(extras, left=3, heading=False, indent=2),
        ]
    )


def _engine_line(engine: dict[str, Any]) -> str:
    library = "" if engine["library"] in (engine["name"], "onnx") else f" ({engine['library']})"
    where = f"{engine['name']}{library} on {engine['device']}"
    return f"{where}: can run" if engine["runs"] else f"{where}: cannot run ({engine['reason']})"
