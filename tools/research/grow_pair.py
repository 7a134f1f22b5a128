"""Grow a Llama checkpoint to a larger shape without changing the function it computes.

The residual dimensions that are added stay exactly zero, so text and acceptance are those of the small model while the
cost is that of the large one. Speculation can thus be timed at any size without a trained model of that size.

No two matrices are equal, as those of a trained model are not: a runtime may keep equal ones once, which costs less.

    python -m trt_spec.tools.research.grow_pair SOURCE OUT --hidden 768 --layers 12 --heads 12 --kv-heads 4 --mlp 2048

--head HEAD OUT grows a head of the checkpoint with it, and may be repeated.
"""

import argparse
import json
import sys
from pathlib import Path

from ..flags.sampling import positive
from ..making.growing import LlamaSize, grow
from ..program import program
from .grow_head import grow_head


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="the checkpoint to grow")
    parser.add_argument("out", type=Path, help="where the grown checkpoint is written")
    for name in LlamaSize.__dataclass_fields__:
        parser.add_argument(f"--{name.replace('_', '-')}", type=positive, required=True, metavar="N")
    parser.add_argument(
        "--head", type=Path, nargs=2, action="append", default=[], metavar=("HEAD", "OUT"), help="a head of it, too"
    )


def run(arguments: argparse.Namespace) -> int:
    shape = LlamaSize(**{name: getattr(arguments, name) for name in LlamaSize.__dataclass_fields__})
    print(f"{grow(arguments.source, arguments.out, shape):,} parameters in {arguments.out}")
    for head, out in arguments.head:
        old = LlamaSize.of(json.loads((arguments.source / "config.json").read_text(encoding="utf-8")))
        print(f"{grow_head(head, out, old, shape):,} parameters in {out}")
    return 0


main = program("grow_pair", __doc__, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
