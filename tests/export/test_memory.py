"""Memory of an export at size: measured in a process of its own, the peak it ever had against the weights it wrote."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ..kit.models import large_llama

ALLOWED = 2.5  # times the checkpoint in the exported dtype, libraries and check included
SCRIPT = """
import json, re, sys
from pathlib import Path
from trt_spec.export import export_bundle

(target,) = export_bundle(sys.argv[1], sys.argv[2], dtype=sys.argv[3]).models
# Not ru_maxrss, in which a process inherits the peak of the one that started it.
peak = 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
print(json.dumps({"peak": peak, "parameters": target.entry.parameters, "seconds": target.seconds}))
"""

pytestmark = [pytest.mark.exhaustive, pytest.mark.long]


@pytest.mark.parametrize(
    ("layers", "vocab", "stored", "dtype"),
    [
        pytest.param(16, 128256, torch.bfloat16, "bfloat16", id="Llama-3.2-1B"),
        pytest.param(4, 32768, torch.bfloat16, "float32", id="a quarter of it, widened"),
    ],
)
def test_peak_memory_stays_below_its_bound(
    tmp_path: Path, layers: int, vocab: int, stored: torch.dtype, dtype: str
) -> None:
    checkpoint = large_llama(tmp_path / "checkpoint", layers, stored, vocab)
    arguments = [str(checkpoint), str(tmp_path / "bundle"), dtype]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    whole = found["parameters"] * (4 if dtype == "float32" else 2)
    print(
        f"\npeak {found['peak'] / 1e9:.2f} GB, {found['peak'] / whole:.2f} of the checkpoint, {found['seconds']:.0f} s"
    )
    assert found["peak"] < ALLOWED * whole
