"""What this machine is: its processor, its memory and its GPUs."""

import platform
from pathlib import Path
from typing import Any

from ..engines import usable_cores

CPU_FEATURES = ("avx2", "fma", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")


def machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "cpu": {
            "model": _proc_field("cpuinfo", "model name") or platform.machine(),
            "cores": usable_cores(),
            "features": [name for name in CPU_FEATURES if name in (_proc_field("cpuinfo", "flags") or "").split()],
        },
        "memory": {"total_bytes": _memory("MemTotal"), "available_bytes": _memory("MemAvailable")},
        "gpus": sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*")),
    }


def _proc_field(file: str, name: str) -> str | None:
    """The first value of a field in a file of /proc, or None if there is no such file or field."""
    try:
        lines = Path("/proc", file).read_text().splitlines()
    except OSError:
        return None
    values = (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name)
    return next(values, None)


def _memory(name: str) -> int | None:
    value = _proc_field("meminfo", name)
    return None if value is None else int(value.removesuffix(" kB")) * 1024
