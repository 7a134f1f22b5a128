"""The conditions of a measurement: its time, versions, machine and memory."""

import platform
import resource
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import torch

from ...engines import ENGINES, Bundle, engines_of
from ..extras import PACKAGE, installed
from ..machine import machine


def conditions(bundle: Bundle, engine: str, device: str, compared: Sequence[str]) -> dict[str, Any]:
    engines = dict.fromkeys(engines_of(engine))
    packages = [PACKAGE, "torch", *(name for one in engines for name in ENGINES[one].packages), *compared]
    found = machine()
    if device.startswith("cuda"):
        found["gpus"] = [torch.cuda.get_device_name(device)]
    return {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()}
        | {name: version for name in packages if (version := installed(name)) is not None},
        "bundle_made_by": bundle.made_by,
        "machine": found,
    }


def memory_used(device: str) -> dict[str, int | None]:
    """The peak of this process so far, and on a GPU what all processes hold there now."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    on_gpu = None
    if device.startswith("cuda"):
        free, total = torch.cuda.mem_get_info(device)
        on_gpu = total - free
    return {"peak_resident_bytes": peak if sys.platform == "darwin" else 1024 * peak, "gpu_bytes": on_gpu}
