"""`build_plans`: compile the roles of a bundle's graphs to TensorRT plans, each whole or not at all."""

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ..engines import MAX_DRAFT_LENGTH, SLACK, Bundle, Contract, EngineError, ExportError
from ..engines.plans import Plan, PlanKey, graph_identity, read_plan
from .audit import audit
from .passes.specialise import specialise
from .passes.spell_softcap import spell_softcap
from .passes.widen_lookups import widen_lookups

LIBRARIES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
TIMING_CACHE = "timing.cache"
CAPABILITY = re.compile(r"[1-9]\d?\.\d")


@dataclass(frozen=True)
class Role:
    """A shape of one model's graph."""

    name: str
    model: str
    width: int
    rows: int


@dataclass(frozen=True)
class BuildOptions:
    """What to compile, and for which GPUs."""

    engine: str
    compute_capabilities: Sequence[str] = ()  # empty: of the GPU that is here
    batch: tuple[int, int] = (1, 1)
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
    """Target verify, draft decode with its two-wide first step, and prefill of both."""
    k, prefill = options.draft_length, options.prefill_width
    found = [Role("verify", "target", k + 1, k + 1)]
    if prefill:
        found.append(Role("prefill", "target", prefill, 1))
    if has_draft and k:
        found += [Role("first", "draft", 2, 1), Role("decode", "draft", 1, 1)]
        if prefill:
            found.append(Role("prefill", "draft", prefill, 1))
    return found


@dataclass(frozen=True)
class BuildReport:
    plans: list[Plan]
    built: int  # the others were there
    seconds: float


def build_plans(
    path: str | Path, options: BuildOptions, progress: Callable[[str], None] = lambda stage: None
) -> BuildReport:
    """Compile what the bundle lacks; what is there and still true is kept."""
    begun = time.perf_counter()
    bundle = Bundle.open(path)
    compiler = _Compiler(options)
    plans, built = [], 0
    for capability in options.compute_capabilities or [compiler.capability_here()]:
        compiler.refuse_unknown(capability)
        for role in roles(options, bundle.draft is not None):
            contract = bundle.models[role.model].contract
            key = PlanKey(
                model=role.model,
                graph=graph_identity(bundle, role.model),
                engine=options.engine,
                version=compiler.version,
                compute_capability=capability,
                width=role.width,
                rows=role.rows,
                batch=options.batch,
                capacity=contract.max_length + SLACK,
                workspace=options.workspace,
                unfused_attention=options.unfused_attention,
            )
            sidecar = (bundle.path / key.path).with_suffix(".json")
            if sidecar.exists():
                progress(f"{role.model} {role.name} for {capability}: is there")
            else:
                progress(f"{role.model} {role.name} for {capability}: compiling")
                _write(bundle, role, key, contract, compiler)
                built += 1
            plans.append(read_plan(sidecar))
    return BuildReport(plans, built, time.perf_counter() - begun)


def prepare(graph: Path, role: Role, capacity: int) -> tuple[ir.Model, dict[str, int]]:
    """The graph as TensorRT gets it, and how often each pass fired; its weights stay in their file."""
    model = ir.load(graph)
    fired = {"specialise": specialise(model, {"width": role.width, "rows": role.rows, "capacity": capacity})}
    fired |= {"spell_softcap": spell_softcap(model), "widen_lookups": widen_lookups(model)}
    return model, fired


def _write(bundle: Bundle, role: Role, key: PlanKey, contract: Contract, compiler: "_Compiler") -> None:
    begun = time.perf_counter()
    model, fired = prepare(bundle.graph(role.model), role, key.capacity)
    cache = bundle.path / key.path.parent / TIMING_CACHE
    plan = compiler.compile(model, bundle.graph(role.model), contract, key, fired["spell_softcap"], cache)
    sidecar = Plan(
        key=key,
        role=role.name,
        bytes=len(plan),
        sha256=hashlib.sha256(plan).hexdigest(),
        build_seconds=round(time.perf_counter() - begun, 3),
        made_by=compiler.made_by,
        inputs=[str(spec) for spec in contract.inputs],
        outputs=[str(spec) for spec in contract.outputs],
        aliases=contract.aliases,
    )
    file = bundle.path / key.path
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _write_whole(file, plan)
        _write_whole(file.with_suffix(".json"), sidecar.to_json().encode())  # last: it says that the plan is there
    except OSError as error:
        raise ExportError(f"cannot write plan {file}: {error.strerror or error}; no half plan was left") from error


def _write_whole(file: Path, content: bytes) -> None:
    partial = file.with_name(f".{file.name}.partial-{os.getpid()}")
    try:
        partial.write_bytes(content)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


class _Compiler:
    """One of the two TensorRT libraries, driven through Polygraphy."""

    def __init__(self, options: BuildOptions) -> None:
        self.options = options
        self.is_rtx = options.engine == "tensorrt-rtx"
        os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = "1" if self.is_rtx else "0"  # read when it is first imported
        try:
            self.trt: Any = import_module(LIBRARIES[options.engine])
            self.polygraphy: Any = import_module("polygraphy")
        except ImportError as error:
            raise EngineError(
                f"building for {options.engine} needs {error.name}; pip install 'trt-spec[{options.engine}]'"
            ) from error
        if self.is_rtx != self.polygraphy.config.USE_TENSORRT_RTX:
            raise EngineError("Polygraphy already serves the other TensorRT; build for it in another process")
        self.version: str = self.trt.__version__
        self.made_by = {options.engine: self.version, "polygraphy": self.polygraphy.__version__}

    def capability_here(self) -> str:
        import torch

        if not torch.cuda.is_available():
            raise EngineError("there is no GPU here to build for; name one with --compute-capability, such as 8.9")
        return ".".join(map(str, torch.cuda.get_device_capability()))

    def refuse_unknown(self, capability: str) -> None:
        if self.is_rtx:
            known = [name[2:-1] + "." + name[-1] for name in dir(self.trt.ComputeCapability) if name.startswith("SM")]
            if capability not in known:
                raise EngineError(
                    f"{self.options.engine} {self.version} does not compile for compute capability {capability}, "
                    f"expected one of {', '.join(sorted(known, key=float))}"
                )
        elif capability != (here := self.capability_here()):
            raise EngineError(
                f"tensorrt compiles for the GPU that is here, of compute capability {here}, not for {capability}; "
                "build there, or with --engine tensorrt-rtx"
            )

    def compile(
        self, model: ir.Model, graph: Path, contract: Contract, key: PlanKey, spelled: int, timing_cache: Path
    ) -> bytes:
        from polygraphy.backend.trt import CreateConfig, Profile, create_network, engine_bytes_from_network
        from polygraphy.exception import PolygraphyException

        with self._complaints() as complaints:
            flags = self.trt.NetworkDefinitionCreationFlag
            builder, network = create_network(strongly_typed=True if hasattr(flags, "STRONGLY_TYPED") else None)
            parser = self.trt.OnnxParser(network, builder.logger)
            if not parser.parse(ir.to_proto(model).SerializeToString(), str(graph)):
                problem = parser.get_error(0)
                raise ExportError(
                    f"{self.options.engine} {self.version} cannot read node {problem.node_name()} "
                    f"({problem.node_operator()}) of the {key.model} graph: {_first_line(problem.desc())}"
                )
            unfused = key.unfused_attention or contract.dtype == "float32"  # of which there are no fused kernels
            if unfused:
                self._allow_unfused(network)
            sizes = {"width": key.width, "rows": key.rows, "capacity": key.capacity}
            audit(self.trt, network, contract, sizes, spelled, unfused)
            settings: dict[str, Any] = {"profiles": [_profile(Profile(), contract, key)]}
            if self.options.workspace is not None:
                settings["memory_pool_limits"] = {self.trt.MemoryPoolType.WORKSPACE: self.options.workspace}
            if self.is_rtx:
                from polygraphy.backend.tensorrt_rtx import CreateConfigRTX

                capability = tuple(map(int, key.compute_capability.split(".")))
                config = CreateConfigRTX(compute_capabilities=[capability], **settings)
                timings = None  # it compiles ahead of time, without timing
            else:
                timing_cache.parent.mkdir(parents=True, exist_ok=True)
                timings = str(timing_cache)
                config = CreateConfig(load_timing_cache=timings, **settings)
            try:
                plan = engine_bytes_from_network((builder, network), config, save_timing_cache=timings)
            except PolygraphyException as error:
                reason = complaints[0] if complaints else _first_line(str(error))
                if "not supported by a dedicated kernel" in reason:
                    reason = "it has no fused kernel for this attention; --unfused-attention allows one in parts"
                raise ExportError(
                    f"{self.options.engine} {self.version} cannot compile the {key.model} graph at width {key.width} "
                    f"for {key.compute_capability}: {reason}"
                ) from error
        return bytes(plan)

    @contextmanager
    def _complaints(self) -> Iterator[list[str]]:
        """The library's errors, which it writes to its logger and nowhere else."""
        from polygraphy.logger import G_LOGGER

        found: list[str] = []
        write, severity = G_LOGGER.log, G_LOGGER.module_severity

        def log(message: Any, severity: int, *_: Any, **__: Any) -> None:
            if severity >= G_LOGGER.ERROR:
                found.append(_first_line(str(message() if callable(message) else message)))

        G_LOGGER.log = log
        try:
            yield found
        finally:
            G_LOGGER.log, G_LOGGER.module_severity = write, severity

    def _allow_unfused(self, network: Any) -> None:
        for index in range(network.num_layers):
            layer = network.get_layer(index)
            if layer.type == self.trt.LayerType.ATTENTION_INPUT:
                layer.__class__ = self.trt.IAttentionInputLayer
                layer.attention.decomposable = True


def _profile(profile: Any, contract: Contract, key: PlanKey) -> Any:
    sizes = {"width": key.width, "rows": key.rows, "capacity": key.capacity}
    smallest, largest = key.batch
    for spec in contract.inputs:
        shapes = [
            tuple(batch if dim == "batch" else sizes.get(str(dim), dim) for dim in spec.shape)
            for batch in (smallest, largest, largest)
        ]
        profile.add(spec.name, *shapes)
    return profile


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
