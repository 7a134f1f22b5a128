"""Shows what an export has written, and what it found out about it."""

import shlex
from typing import TYPE_CHECKING, Any

from ..engines.bundle import VISION
from .console import in_bytes, table

if TYPE_CHECKING:
    from ..export.writing.report import ExportReport, ModelReport, VisionReport

HEADINGS = (
    "model",
    "from",
    "parameters",
    "nodes",
    "size",
    "dtype",
    "weights",
    "worst error",
    "seconds",
)


def shown(report: "ExportReport") -> str:
    """A table of the models that were written, and what was found out about them."""
    rows: list[tuple[str, ...]] = [HEADINGS, *(_row(model.role, model) for model in report.models)]
    if report.vision is not None:
        rows.append(_row(VISION, report.vision))
    lines = [table(rows, left=2)]
    if any(model.entry.check.get("as_float32_copy") for model in report.models):
        lines.append("checked as float32 copy: the same weights file, computed in float32")
    checks = {model.role: model.entry.check for model in report.models}
    # Of heads nothing is said on running text but their overlap.
    lines += [_quality(role, check["quality"]) for role, check in checks.items() if "quality" in check]
    lines += [_cache(role, check["cache"]) for role, check in checks.items() if "cache" in check]
    for role, alphas in report.overlap.items():
        accepted = ", ".join(f"{alpha:.3f} at temperature {t:g}" for t, alpha in alphas.items())
        which = "the draft" if len(report.overlap) == 1 else role
        lines.append(f"acceptance expected of {which} on the text: {accepted}")
    lines += [f"note: {note}" for note in report.notes]
    lines += [_became(model) for model in report.models if model.entry.dequantised]
    lines.append(f"{report.path}: sequences up to {report.max_length} tokens, written in {report.seconds:.1f} s")
    place = shlex.quote(str(report.path))
    lines.append(f"next: trt-spec bench --bundle {place} measures its speed here, trt-spec serve {place} serves it")
    return "\n".join(lines)


def _row(role: str, written: "ModelReport | VisionReport") -> tuple[str, ...]:
    entry = written.entry
    return (
        role,
        entry.name,
        f"{entry.parameters:,}",
        str(written.nodes),
        in_bytes(written.weight_bytes),
        entry.contract.dtype,
        entry.weights,
        _error(entry.check),
        f"{written.seconds:.1f}",
    )


def _became(model: "ModelReport") -> str:
    """What a quantised checkpoint has become, and how more of it could be kept."""
    entry = model.entry
    stored = entry.contract.dtype if entry.weights == "none" else entry.weights
    was = entry.dequantised.partition(":")[0]
    said = f"{model.role}: {was}, {in_bytes(model.checkpoint_bytes)} → {stored}, {in_bytes(model.weight_bytes)}"
    if entry.weights != "none":
        return said
    keeps = (
        "auto keeps Q4_0, Q4_1, Q4_K, Q6_K and Q8_0" if was.startswith("GGUF") else "int4 and int8 keep whole numbers"
    )
    return f"{said}; --weights {keeps} as they are"


def _quality(role: str, quality: dict[str, Any]) -> str:
    return (
        f"{role} on a text of {quality['tokens']} tokens: perplexity {quality['perplexity']:.4g}, of the checkpoint "
        f"{quality['checkpoint_perplexity']:.4g}; KL {quality['divergence']:.1e}; worst logit off by "
        f"{quality['worst_logit_error']:.1e} standard deviations"
    )


def _cache(role: str, cost: dict[str, float]) -> str:
    return (
        f"{role} over its rounded cache, beside a full one: KL {cost['divergence']:.1e}; the best token is the same "
        f"for {cost['agreement']:.1%} of the text"
    )


def _error(check: dict[str, Any]) -> str:
    if not check:
        return "not checked"
    return f"{check['worst_error']:.1e} of {check['tolerance']:.1e} allowed"
