"""Compile the roles of a bundle's graphs to TensorRT plans, each written whole or not at all."""

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ...engines import WHOLE_IMAGES, Bundle, Contract, EngineError, ExportError, VisionContract
from ...engines.bundle import VISION, graph_identity
from ...engines.bundle.whole_files import PARTIAL, claimed, remove_leftovers, take_place, write_whole
from ...engines.tensorrt import LIBRARIES, CompiledPlan, Library, PlanKey, capability_of, read_plan
from .roles import SEE, BuildOptions, roles, with_more_of_target
from .seeing import ranges_of_images

TIMING_CACHE = "timing.cache"
FIRST_WITH_FP4 = (10, 0)  # compute capability of GPUs
COMPILER = f"{__package__}.compiler"  # a module to run


@dataclass(frozen=True)
class BuildReport:
    """The plans that were asked for, and how many of them had to be compiled."""

    bundle: Bundle
    plans: list[CompiledPlan]
    built: int  # the others were there
    seconds: float


def build_plans(
    path: str | Path, options: BuildOptions, progress: Callable[[str], None] = lambda stage: None
) -> BuildReport:
    """Compile what the bundle lacks; what is there and still true is kept."""
    begun = time.perf_counter()
    bundle = Bundle.open(path)
    if WHOLE_IMAGES in bundle.target.contract.capabilities:
        raise ExportError(
            f"the target of bundle {path} reads all tokens of an image in one call, for which no plans are made; use "
            "engine onnxruntime or torch, or export without --images"
        )
    _refuse_missing(options.engine)
    library = Library(options.engine)
    plans, built = [], 0
    capabilities = options.compute_capabilities or [_capability_here()]
    for capability in capabilities:
        _refuse_unknown(capability, library)
        _refuse_fp4(capability, bundle)
    with _compiler(options.engine) as compile_:
        heads = {name: bundle.models[name].contract for name in bundle.heads}
        masks = {name: own for name, model in bundle.models.items() if (own := model.masks) is not None}
        plain = roles(options, [*bundle.drafts, *filter(None, [bundle.foreign])], heads, masks)
        found = with_more_of_target(plain, bundle.target.contract)
        if bundle.vision is not None:
            found.append(replace(SEE, ranges=ranges_of_images(bundle.path, bundle.vision.contract)))
        for role in found:
            for capability in capabilities:  # for all of which the graph is rewritten once
                key = PlanKey(
                    model=role.model,
                    graph="",
                    engine=options.engine,
                    version=library.version,
                    compute_capability=capability,
                    width=role.width,
                    rows=role.rows,
                    batch=role.batch,
                    capacity=bundle.capacity,
                    workspace=options.workspace,
                    unfused_attention=options.unfused_attention,
                    source=bundle.longest_source(role.model),
                    ranges=role.ranges,
                    shard=role.shard,
                )
                key = replace(key, graph=graph_identity(bundle.path, key.folder.as_posix(), key.file))
                sidecar = (bundle.path / key.path).with_suffix(".json")
                if sidecar.exists():
                    progress(f"{role.model} {role.name} for {capability}: is there")
                else:
                    progress(f"{role.model} {role.name} for {capability}: compiling")
                    _write(bundle, role.name, key, compile_)
                    built += 1
                plans.append(read_plan(sidecar))
    return BuildReport(bundle, plans, built, time.perf_counter() - begun)


Compile = Callable[[dict[str, Any]], dict[str, Any]]


def _write(bundle: Bundle, role: str, key: PlanKey, compile_: Compile) -> None:
    begun = time.perf_counter()
    contract: Contract | VisionContract
    if key.model == VISION:
        assert bundle.vision is not None
        contract = bundle.vision.contract
    else:
        whole = bundle.models[key.model].contract
        contract = whole if key.adapted else whole.without_adapters
    file = (bundle.path / key.path).resolve()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(file.parent)
        with claimed(file, PARTIAL) as (partial, stream):
            order = {
                "key": asdict(key),
                "contract": contract.to_json(),
                "graph": str((bundle.path / key.folder / key.file).resolve()),
                "file": str(partial),
                "timing_cache": str(file.with_name(TIMING_CACHE)),
            }
            plan = CompiledPlan(
                key=key,
                role=role,
                **compile_(order),
                build_seconds=round(time.perf_counter() - begun, 3),
                inputs=[str(spec) for spec in contract.inputs],
                outputs=[str(spec) for spec in contract.outputs],
                aliases=dict(contract.aliases),
            )
            take_place(partial, stream, file)
        write_whole(file.with_suffix(".json"), plan.to_json().encode())  # last: it says that the plan is there
    except OSError as error:
        raise ExportError(f"cannot write plan {file}: {error.strerror or error}; no half plan was left") from error
    finally:
        with suppress(OSError):  # unless they are empty, because nothing was compiled
            file.parent.rmdir()
            file.parent.parent.rmdir()


@contextmanager
def _compiler(engine: str) -> Iterator[Compile]:
    """Give what compiles one role: compiler.py, in a process of its own that starts with the first order."""
    process: subprocess.Popen[str] | None = None

    def compile_(order: dict[str, Any]) -> dict[str, Any]:
        nonlocal process
        process = process or subprocess.Popen(
            [sys.executable, "-m", COMPILER, engine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            print(json.dumps(order), file=process.stdin, flush=True)
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            code = process.wait()
            complaints.seek(0)
            reason = signal.Signals(-code).name if code < 0 else _last_line(complaints.read())
            raise ExportError(
                f"{engine} {order['key']['version']} crashed while compiling the {order['key']['model']} graph at "
                f"width {order['key']['width']} for {order['key']['compute_capability']} ({reason}); please report it"
            )
        fields: dict[str, Any] = json.loads(answer)
        if "error" in fields:
            raise ExportError(fields["error"])
        return fields

    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints:
        try:
            yield compile_
        finally:
            if process is not None:
                process.kill()
                process.communicate()


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]


def _refuse_missing(engine: str) -> None:
    """Name what the process that compiles would miss."""
    for module, extra in (
        (LIBRARIES[engine], engine),
        ("polygraphy", engine),
        ("onnx_ir", "export"),
        ("onnxscript", "export"),
    ):
        if find_spec(module) is None:
            raise EngineError(f"building for {engine} needs {module}; pip install 'trt-spec[{extra}]'")


def _capability_here() -> str:
    if not torch.cuda.is_available():
        raise EngineError("there is no GPU here to build for; name one with --compute-capability, such as 8.9")
    return capability_of()


def _refuse_unknown(capability: str, library: Library) -> None:
    """RTX compiles for the GPUs that it names, `tensorrt` for the one that is here."""
    if library.is_rtx:
        known = [name[2:-1] + "." + name[-1] for name in dir(library.trt.ComputeCapability) if name.startswith("SM")]
        if capability not in known:
            raise EngineError(
                f"{library.engine} {library.version} does not compile for compute capability {capability}, "
                f"expected one of {', '.join(sorted(known, key=float))}"
            )
    elif capability != (here := _capability_here()):
        raise EngineError(
            f"tensorrt compiles for the GPU that is here, of compute capability {here}, not for {capability}; "
            "build there, or with --engine tensorrt-rtx"
        )


def _refuse_fp4(capability: str, bundle: Bundle) -> None:
    """Refuse weights of a type that such a GPU has not, before anything is compiled."""
    if tuple(map(int, capability.split("."))) >= FIRST_WITH_FP4:
        return
    for name, model in bundle.models.items():
        if model.weights == "nvfp4":
            raise ExportError(
                f"the {name} has its weights in nvfp4, which GPUs of compute capability {capability} cannot read, "
                f"expected {'.'.join(map(str, FIRST_WITH_FP4))} or later; export with --weights fp8 or int4 for these"
            )
