"""Bundles that have a tokenizer and no model, which is all that a grammar needs to be compiled."""

from pathlib import Path

from trt_spec.engines import Bundle
from trt_spec.engines.bundle import TokenizerEntry

SHIPPED = Path(__file__).resolve().parents[3] / "tools" / "demo_pair" / "pycode-14m"


def vocabulary(folder: Path, size: int, eos: int) -> Bundle:
    return Bundle(folder, {}, TokenizerEntry(size, None, (eos,)), {}, {})


DEMO = vocabulary(SHIPPED, 4096, eos=0)  # byte-level BPE, as trained
