"""The flags that choose engine and device, and the decoder that they ask for."""

import argparse

from ...engines import ENGINES
from ...runtime import Decoder


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    first = next(iter(ENGINES))
    where = "; ".join(f"{kind.name}: {' or '.join(kind.devices)}" for kind in ENGINES.values())
    parser.add_argument("--engine", choices=ENGINES, default=first, help=f"what runs the models (default {first})")
    parser.add_argument("--device", default="cpu", metavar="D", help=f"where it runs (default cpu; {where})")


def open_decoder(arguments: argparse.Namespace, max_batch: int) -> Decoder:
    return Decoder.open(arguments.bundle, arguments.engine, arguments.device, max_batch)
