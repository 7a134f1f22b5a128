"""`build_plans`: compile the roles of a bundle's graphs to TensorRT plans, each whole or not at all."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..engines import MAX_DRAFT_LENGTH, SLACK, Bundle, EngineError, ExportError
from ..engines.tensorrt_plans import LIBRARIES, Plan, PlanKey, graph_identity, read_plan, write_whole

TIMING_CACHE = "timing.cache"
COMPILER = f"{__package__}.compiler"  # a module to run
CAPABILITY = re.compile(r"[1-9]\d?\.\d")


@dataclass(frozen=True)
class Role:
    """A shape of one model's graph."""

    name: str
    model: str
    width: int
    rows: int
    batch: tuple[int, int]


@dataclass(frozen=True)
class BuildOptions:
    """What to compile, and for which GPUs."""

    engine: str
    compute_capabilities: Sequence[str] = ()  # empty: of the GPU that is here
    batch: tuple[int, int] = (1, 8)
    draft_length: int = 4
    prefill_width: int = 128  # 0: the verify plan prefills
    workspace: int | None = None  # bytes
    unfused_attention: bool = False  # allowed also where there is a fused one, in half precision

    def __post_init__(self) -> None:
        if self.engine not in LIBRARIES:
            raise ExportError(f"there is no engine {self.engine!r} to build for, expected {' or '.join(LIBRARIES)}")
        if not 1 <= self.batch[0] <= self.batch[1]:
            raise ExportError(f"batch is {self.batch[0]}..{self.batch[1]}, expected two numbers from 1 on, in order")
        if not 0 <= self.draft_length <= MAX_DRAFT_LENGTH:
            raise ExportError(f"draft length is {self.draft_length}, expected 0 to {MAX_DRAFT_LENGTH}")
        if self.prefill_width and not self.draft_length + 1 < self.prefill_width <= SLACK:
            raise ExportError(
                f"prefill width is {self.prefill_width}, expected {self.draft_length + 2} to {SLACK}, or 0 for none"
            )
        for capability in self.compute_capabilities:
            if not CAPABILITY.fullmatch(capability):
                raise ExportError(f"compute capability is {capability!r}, expected one like 8.9")


def roles(options: BuildOptions, has_draft: bool) -> list[Role]:
    """Target verify, draft decode with its two-wide first step, and prefill of both, which reads a row at a time."""
    k, prefill = options.draft_length, options.prefill_width
    found = [Role("verify", "target", k + 1, k + 1, options.batch)]
    if prefill:
        found.append(Role("prefill", "target", prefill, 1, (1, 1)))
    if has_draft and k:
        found += [Role("first", "draft", 2, 1, options.batch), Role("decode", "draft", 1, 1, options.batch)]
        if prefill:
            found.append(Role("prefill", "draft", prefill, 1, (1, 1)))
    return found


@dataclass(frozen=True)
class BuildReport:
    bundle: Bundle
    plans: list[Plan]
    built: int  # the others were there
    seconds: float


def build_plans(
    path: str | Path, options: BuildOptions, progress: Callable[[str], None] = lambda stage: None
) -> BuildReport:
    """Compile what the bundle lacks; what is there and still true is kept."""
    begun = time.perf_counter()
    bundle = Bundle.open(path)
    library = _Library(options.engine)
    plans, built = [], 0
    with _compiler(options.engine) as compile_:
        for capability in options.compute_capabilities or [library.capability_here()]:
            library.refuse_unknown(capability)
            for role in roles(options, bundle.draft is not None):
                key = PlanKey(
                    model=role.model,
                    graph=graph_identity(bundle.path, role.model),
                    engine=options.engine,
                    version=library.version,
                    compute_capability=capability,
                    width=role.width,
                    rows=role.rows,
                    batch=role.batch,
                    capacity=bundle.capacity,
                    workspace=options.workspace,
                    unfused_attention=options.unfused_attention,
                )
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
    contract = bundle.models[key.model].contract
    file = (bundle.path / key.path).resolve()
    partial = file.with_name(f".{file.name}.partial-{os.getpid()}")
    order = {
        "key": asdict(key),
        "contract": asdict(contract),
        "graph": str(bundle.graph(key.model).resolve()),
        "file": str(partial),
        "timing_cache": str(file.with_name(TIMING_CACHE)),
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        plan = Plan(
            key=key,
            role=role,
            **compile_(order),
            build_seconds=round(time.perf_counter() - begun, 3),
            inputs=[str(spec) for spec in contract.inputs],
            outputs=[str(spec) for spec in contract.outputs],
            aliases=contract.aliases,
        )
        partial.replace(file)
        write_whole(file.with_suffix(".json"), plan.to_json().encode())  # last: it says that the plan is there
    except OSError as error:
        raise ExportError(f"cannot write plan {file}: {error.strerror or error}; no half plan was left") from error
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _compiler(engine: str) -> Iterator[Compile]:
    """compiler.py in a process of its own, started with the first order."""
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


class _Library:
    """What the library that will compile is and can, asked without Polygraphy."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        for module in (LIBRARIES[engine], "polygraphy"):
            if find_spec(module) is None:
                raise EngineError(f"building for {engine} needs {module}; pip install 'trt-spec[{engine}]'")
        self.trt: Any = import_module(LIBRARIES[engine])
        self.version: str = self.trt.__version__

    def capability_here(self) -> str:
        import torch

        if not torch.cuda.is_available():
            raise EngineError("there is no GPU here to build for; name one with --compute-capability, such as 8.9")
        return ".".join(map(str, torch.cuda.get_device_capability()))

    def refuse_unknown(self, capability: str) -> None:
        if self.engine == "tensorrt-rtx":
            known = [name[2:-1] + "." + name[-1] for name in dir(self.trt.ComputeCapability) if name.startswith("SM")]
            if capability not in known:
                raise EngineError(
                    f"{self.engine} {self.version} does not compile for compute capability {capability}, "
                    f"expected one of {', '.join(sorted(known, key=float))}"
                )
        elif capability != (here := self.capability_here()):
            raise EngineError(
                f"tensorrt compiles for the GPU that is here, of compute capability {here}, not for {capability}; "
                "build there, or with --engine tensorrt-rtx"
            )
