"""Compile in a process of its own: a crash of TensorRT ends this one, and is one sentence in the one that started it.

Reads orders as lines of JSON and answers each with one: the fields of a sidecar, or an error.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ...engines import Contract, ExportError, VisionContract
from ...engines.bundle import VISION
from ...engines.errors import first_line
from ...engines.tensorrt import Library, PlanKey
from ..passes.merge_attentions import merge_attentions
from ..passes.pack_queries import pack_queries
from ..passes.rewriting import Rewrite, rewritten
from ..passes.specialise import specialise
from ..passes.spell_collectives import spell_collectives
from ..passes.spell_picks import spell_picks
from ..passes.spell_softcap import spell_softcap
from ..passes.stack_heads import unstack_heads
from ..passes.widen_lookups import widen_lookups
from .audit import audit, audit_vision, layers

REWRITES: tuple[Rewrite, ...] = (
    spell_softcap,
    merge_attentions,
    spell_picks,
    widen_lookups,
    pack_queries,
    spell_collectives,
)


def prepare(graph: Path, key: PlanKey) -> tuple[ir.Model, dict[str, int]]:
    """Rewrite the graph for TensorRT and count how often each pass fired; its weights stay in their file."""
    model = ir.load(graph)
    _refuse_zero_points(model, key)
    fired = rewritten(model, (unstack_heads,)) | {"specialise": specialise(model, key.sizes)}
    return model, fired | rewritten(model, REWRITES)


def _refuse_rounded_cache(contract: Contract | VisionContract, key: PlanKey) -> None:
    if narrow := contract.rounded_to:
        raise ExportError(
            f"{key.engine} writes caches of float32, float16 and bfloat16 alone, the {key.model} graph keeps keys and "
            f"values in {narrow}; export with --cache full"
        )


def _refuse_zero_points(model: ir.Model, key: PlanKey) -> None:
    """Refuse weights whose zero points are not in the middle: the library's parser does, and does not say why."""
    if any(node.op_type == "DequantizeLinear" and len(node.inputs) > 2 for node in model.graph):
        raise ExportError(
            f"{key.engine} takes no weights with zero points, which the {key.model} graph keeps as its checkpoint has "
            "them; export with --weights int8, which keeps the same numbers without"
        )


class Compiler:
    """One of the two TensorRT libraries, driven through Polygraphy, which serves one in a process."""

    def __init__(self, engine: str) -> None:
        library = Library(engine)
        self.engine, self.is_rtx, self.trt = engine, library.is_rtx, library.trt
        os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = "1" if self.is_rtx else "0"  # read when it is first imported
        polygraphy: Any = import_module("polygraphy")
        self.made_by = {engine: library.version, "polygraphy": str(polygraphy.__version__)}
        self._prepared: tuple[object, bytes, dict[str, int]] = (None, b"", {})  # the last, for other GPUs

    def compile(self, graph: Path, contract: Contract | VisionContract, key: PlanKey, timing_cache: Path) -> Any:
        """Give the plan's bytes, as a buffer."""
        from polygraphy.backend.trt import CreateConfig, Profile, create_network, engine_bytes_from_network
        from polygraphy.exception import PolygraphyException

        _refuse_rounded_cache(contract, key)
        if self._prepared[0] != (graph, key.graph, key.sizes):
            model, fired = prepare(graph, key)
            self._prepared = (graph, key.graph, key.sizes), ir.to_proto(model).SerializeToString(), fired
        _, prepared, fired = self._prepared
        with self._complaints() as complaints:
            flags = self.trt.NetworkDefinitionCreationFlag
            builder, network = create_network(strongly_typed=True if hasattr(flags, "STRONGLY_TYPED") else None)
            parser = self.trt.OnnxParser(network, builder.logger)
            if not parser.parse(prepared, str(graph)):
                problem = parser.get_error(0)
                reason = complaints[0] if complaints else first_line(problem.desc())
                raise ExportError(
                    f"{self.engine} {key.version} cannot read node {problem.node_name()} "
                    f"({problem.node_operator()}) of the {key.model} graph: {reason}"
                )
            unfused = key.unfused_attention or contract.dtype == "float32"  # of which there are no fused kernels
            if unfused:
                self._allow_unfused(network)
            if isinstance(contract, VisionContract):
                audit_vision(self.trt, network, contract, key.sizes)
            else:
                audit(self.trt, network, contract, key.sizes, fired["spell_softcap"], unfused)
            settings: dict[str, Any] = {"profiles": [_profile(Profile(), contract, key)]}
            if key.workspace is not None:
                settings["memory_pool_limits"] = {self.trt.MemoryPoolType.WORKSPACE: key.workspace}
            if self.is_rtx:
                from polygraphy.backend.tensorrt_rtx import CreateConfigRTX
                from polygraphy.backend.trt import PostprocessConfig

                capability = tuple(map(int, key.compute_capability.split(".")))
                config = PostprocessConfig(
                    CreateConfigRTX(compute_capabilities=[capability], **settings), self._require_user_allocation
                )
                timings = None  # it compiles ahead of time, without timing
            else:
                timings = str(timing_cache)
                config = CreateConfig(load_timing_cache=timings, **settings)
            try:
                return engine_bytes_from_network((builder, network), config, save_timing_cache=timings)
            except PolygraphyException as error:
                reason = complaints[0] if complaints else first_line(error)
                if "not supported by a dedicated kernel" in reason:
                    reason = "it has no fused kernel for this attention; --unfused-attention allows one in parts"
                raise ExportError(
                    f"{self.engine} {key.version} cannot compile the {key.model} graph at width {key.width} "
                    f"for {key.compute_capability}: {reason}"
                ) from error

    @contextmanager
    def _complaints(self) -> Iterator[list[str]]:
        """Collect the library's errors, which it writes to its logger and nowhere else."""
        from polygraphy.logger import G_LOGGER

        found: list[str] = []
        write, severity = G_LOGGER.log, G_LOGGER.module_severity

        def log(message: Any, severity: int, *_: Any, **__: Any) -> None:
            if severity >= G_LOGGER.ERROR:
                found.append(first_line(message() if callable(message) else message))

        G_LOGGER.log = log
        try:
            yield found
        finally:
            G_LOGGER.log, G_LOGGER.module_severity = write, severity

    def _require_user_allocation(self, builder: Any, network: Any, config: Any) -> None:
        """Without this a plan may not be captured in a CUDA graph."""
        config.set_flag(self.trt.BuilderFlag.REQUIRE_USER_ALLOCATION)

    def _allow_unfused(self, network: Any) -> None:
        for layer in layers(network, self.trt.LayerType.ATTENTION_INPUT, self.trt.IAttentionInputLayer):
            layer.attention.decomposable = True


def _profile(profile: Any, contract: Contract | VisionContract, key: PlanKey) -> Any:
    smallest, largest = ({name: size[end] for name, size in key.free.items()} | key.sizes for end in (0, 1))
    for spec in contract.inputs:
        shapes = [tuple(sizes.get(str(dim), dim) for dim in spec.shape) for sizes in (smallest, largest, largest)]
        profile.add(spec.name, *shapes)
    return profile


def _answer(compiler: Compiler, order: dict[str, Any]) -> dict[str, Any]:
    """Compile an order into the file that it names; if that fails, whoever gave the order removes the file."""
    key, file = PlanKey.from_json(order["key"]), Path(order["file"])
    kind = VisionContract if key.model == VISION else Contract
    contract = kind.from_json(order["contract"])
    try:
        plan = compiler.compile(Path(order["graph"]), contract, key, Path(order["timing_cache"]))
        file.write_bytes(plan)
    except OSError as error:
        return {"error": f"cannot write plan {file}: {error.strerror or error}; no half plan was left"}
    except ExportError as error:
        return {"error": str(error)}
    return {"bytes": plan.nbytes, "sha256": hashlib.sha256(plan).hexdigest(), "made_by": compiler.made_by}


def main(engine: str) -> None:
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # what the libraries print is no answer
        compiler = Compiler(engine)
        for line in sys.stdin:
            print(json.dumps(_answer(compiler, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
