"""The flags that choose engine and device, and the decoder that they ask for."""

import argparse

import torch

from ...engines import ENGINES
from ...runtime import Decoder


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine", choices=ENGINES, default="onnxruntime", help="what runs the models (default onnxruntime)"
    )
    parser.add_argument("--device", default="cpu", metavar="D", help="cpu, or cuda for a GPU (default cpu)")


def leave_cores_to(engine: str) -> None:
    if engine == "onnxruntime":
        torch.set_num_threads(1)  # torch has only small operations to do, and its threads would take the engine's cores


def open_decoder(arguments: argparse.Namespace, max_batch: int) -> Decoder:
    leave_cores_to(arguments.engine)
    return Decoder.open(arguments.bundle, arguments.engine, arguments.device, max_batch)
