"""Compiles every kernel that a launch would run for a GPU that need not be there, and says what each needs of it.

`python -m tests.kit.compiled_kernels 90 bfloat16` does it for compute capability 9.0 and one type of numbers. Triton's
interpreter runs Python; its compiler takes less, and needs no GPU.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.runtime.driver import driver

from .launches import LAUNCHED, launch

CAPABILITY, DTYPE = int(sys.argv[1]), getattr(torch, sys.argv[2])
GPU = SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", CAPABILITY, 32),
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
)
run = triton.JITFunction.run


def compile_launch(operator: str, function: Any, *arguments: Any, warmup: bool, **named: Any) -> None:
    """In the place of `JITFunction.run`: compile for these arguments, and do not launch."""
    kernel = run(function, *arguments, warmup=True, **named)
    said = assembled(kernel.asm["ptx"])
    [registers], spilled = re.findall(r"Used (\d+) registers", said), re.findall(r"(\d+) bytes spill", said)
    needs = {"registers": int(registers), "spilled_bytes": sum(map(int, spilled))}
    shared = {"shared_bytes": kernel.metadata.shared}
    print(json.dumps({"operator": operator, "kernel": function.fn.__name__, **needs, **shared}), flush=True)


def assembled(source: str) -> str:
    """Return what the assembler says of a kernel."""
    architecture = f"--gpu-name={sm_arch_from_capability(CAPABILITY)}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(source)
        command = [get_ptxas(CAPABILITY).path, "-v", architecture, file, "-o", os.devnull]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


if __name__ == "__main__":
    driver.set_active(GPU)
    for name in LAUNCHED:
        with patch.object(triton.JITFunction, "run", lambda *a, _name=name, **k: compile_launch(_name, *a, **k)):
            launch(name, DTYPE)
