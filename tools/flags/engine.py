"""Which engine runs a bundle, and where: the flags, and the decoder they ask for."""

import argparse

import torch

from ...engines import ENGINES
from ...runtime import Decoder


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine", choices=ENGINES, default="onnxruntime", help="what runs the graphs (default onnxruntime)"
    )
    parser.add_argument("--device", default="cpu", metavar="D", help="cpu, or cuda where the engine can (default cpu)")


def leave_cores_to(engine: str) -> None:
    if engine == "onnxruntime":
        torch.set_num_threads(1)  # a round's small operations: torch's threads would fight the engine's


def open_decoder(arguments: argparse.Namespace, max_batch: int) -> Decoder:
    leave_cores_to(arguments.engine)
    return Decoder.open(arguments.bundle, arguments.engine, arguments.device, max_batch)
