"""Chooses the plans of a bundle that run on this GPU, in the library that is installed."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import torch

from ..bundle import PLANS, graph_identity
from ..errors import EngineError
from .library import LIBRARIES, capability_of
from .plans import CompiledPlan, read_plan

BUILD = "trt-spec build --bundle {bundle} --engine {engine} --compute-capability {capability}"


def compute_capability(device: str) -> str:
    if not device.startswith("cuda"):
        raise EngineError(f"engine tensorrt runs on the device cuda, not on {device!r}; name cuda")
    if not torch.cuda.is_available():
        raise EngineError("engine tensorrt needs a GPU, and torch sees none; trt-spec doctor says what is missing")
    return capability_of(device)


def choose_plans(graph: Path, capability: str, engine: str | None = None, adapted: bool = False) -> list[CompiledPlan]:
    """Return the model's plans that run here, all of one library; if none does, say why and how to build one.

    Those are of the graph that has room for adapters, or of the one that has not.
    """
    bundle, model = graph.parents[1], graph.parent.name
    plans = [plan for plan in map(read_plan, sorted((bundle / PLANS).glob("*/*.json"))) if plan.key.model == model]
    plans = [plan for plan in plans if engine in (None, plan.key.engine) and plan.key.adapted == adapted]
    engine = plans[0].key.engine if plans else engine or "tensorrt-rtx"
    subject = f"{model} with adapters" if adapted else model
    mend = BUILD.format(bundle=bundle, engine=engine, capability=capability)
    if not plans:
        raise EngineError(f"bundle {bundle} has no plans for its {subject}; compile them: {mend}")
    identity = graph_identity(bundle, model, plans[0].key.file)
    if not (own := [plan for plan in plans if plan.key.graph == identity]):
        raise EngineError(f"the plans in {bundle} are from another export of its {subject}; compile them again: {mend}")
    if not (fitting := [plan for plan in own if plan.key.compute_capability == capability]):
        others = ", ".join(sorted({plan.key.compute_capability for plan in own}, key=float))
        raise EngineError(
            f"the plans of {subject} in {bundle} are for GPUs of compute capability {others}, the one here has "
            f"{capability}; compile them: {mend}"
        )
    reasons = []
    for name in (name for name in LIBRARIES if any(plan.key.engine == name for plan in fitting)):
        try:
            version = import_module(LIBRARIES[name]).__version__
        except ImportError:
            reasons.append(f"need {name}, which is not installed; pip install 'trt-spec[{name}]'")
            continue
        if current := [plan for plan in fitting if (plan.key.engine, plan.key.version) == (name, version)]:
            return one_of_each(current)
        others = ", ".join(sorted({plan.key.version for plan in fitting if plan.key.engine == name}))
        reasons.append(f"were compiled by {name} {others}, but {version} is installed; compile them again: {mend}")
    raise EngineError(f"the plans of {subject} in {bundle} {reasons[0]}")


def one_of_each(plans: Sequence[CompiledPlan]) -> list[CompiledPlan]:
    """Drop each plan whose steps another one also runs, fused or for more sizes: every plan holds all weights."""

    def order(plan: CompiledPlan) -> tuple[bool, int, int]:
        sizes = sum(most - least for _, least, most in plan.key.ranges)
        return plan.key.unfused_attention, plan.key.batch[0] - plan.key.batch[1], -sizes

    kept: list[CompiledPlan] = []
    for plan in sorted(plans, key=order):
        same = [one for one in kept if (one.key.width, one.key.rows) == (plan.key.width, plan.key.rows)]
        if not any(one.key.spans(plan.key) for one in same):
            kept.append(plan)
    return kept
