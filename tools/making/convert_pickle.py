"""Make safetensors of a checkpoint's pickled weights, without running what a pickle may say.

torch reads tensors alone (`weights_only`) and refuses anything else. The folder stays as it is but for the new file.

    python -m trt_spec.tools.making.convert_pickle CHECKPOINT
"""

import argparse
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from ...engines.errors import RequestError, first_line
from ..program import program

OUT = "model.safetensors"
PICKLES = ("pytorch_model*.bin", "medusa_lm_head.pt")


def convert(checkpoint: Path) -> Path:
    """Write the weights of all its `pytorch_model*.bin`, or of its Medusa heads, into one file."""
    files = sorted(file for pattern in PICKLES for file in checkpoint.glob(pattern))
    if not files:
        raise RequestError(f"{checkpoint} has no {' and no '.join(PICKLES)}; name the folder of a checkpoint")
    out = checkpoint / OUT
    if out.exists():
        raise RequestError(f"{out} is there already; nothing is to be done")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # whatever a pickle is that torch does not take
            raise RequestError(f"{file} is not read: {first_line(error)}") from error
        if not isinstance(found, dict) or not all(isinstance(one, torch.Tensor) for one in found.values()):
            raise RequestError(f"{file} holds more than tensors by name; save the model's state_dict alone")
        tensors |= found
    whole = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    aside = out.with_suffix(".part")
    try:
        save_file(whole, aside, {"format": "pt"})
        aside.replace(out)
    finally:
        aside.unlink(missing_ok=True)
    return out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="the folder of the pickled weights")


def run(arguments: argparse.Namespace) -> int:
    print(convert(arguments.checkpoint))
    return 0


main = program("convert_pickle", __doc__, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
