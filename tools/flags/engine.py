"""The flags that choose engine and device, and the decoder that they ask for."""

import argparse
from typing import TYPE_CHECKING

from ...engines import ENGINES, RequestError, together
from ...runtime.scheduling.engine_choice import AUTO_ENGINE
from .groups import ADVANCED, group

if TYPE_CHECKING:
    from ...runtime import Decoder


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    first = next(iter(ENGINES))
    where = "; ".join(f"{kind.name}: {' or '.join(kind.devices)}" for kind in ENGINES.values())
    engines = group(parser, ADVANCED)
    engines.add_argument(
        "--engine",
        choices=[*ENGINES, AUTO_ENGINE],
        metavar="NAME",
        default=first,
        help=f"what runs the models: {', '.join(ENGINES)} or {AUTO_ENGINE} (default {first}; {AUTO_ENGINE}: what "
        f"trt-spec tune --engine {AUTO_ENGINE} found fastest for each, and for so many requests)",
    )
    engines.add_argument(
        "--draft-engine", choices=ENGINES, metavar="NAME", help="what runs the drafts (default: the same)"
    )
    engines.add_argument("--device", default="cpu", metavar="D", help=f"where it runs (default cpu; {where})")


def engine_name(arguments: argparse.Namespace) -> str:
    """Name the engines that the flags ask for; refuse those that do not run there."""
    if arguments.engine == AUTO_ENGINE and arguments.draft_engine:
        raise RequestError(f"--engine {AUTO_ENGINE} chooses the draft's engine as well; leave --draft-engine out")
    for kind in (ENGINES[name] for name in (arguments.engine, arguments.draft_engine) if name in ENGINES):
        device, colon, number = arguments.device.partition(":")
        if device not in kind.devices or (colon and not number.isdecimal()):
            raise RequestError(
                f"engine {kind.name} runs on the device {' or '.join(kind.devices)}, not on {arguments.device!r}; "
                "name that"
            )
    return together(arguments.engine, arguments.draft_engine)


def open_decoder(
    arguments: argparse.Namespace,
    max_batch: int,
    cache_bytes: int | None = None,
    prefix_bytes: int | None = None,
    kind: "type[Decoder] | None" = None,
) -> "Decoder":
    engine = engine_name(arguments)  # before torch is loaded
    from ...runtime import Decoder

    return (kind or Decoder).open(
        arguments.bundle,
        engine,
        arguments.device,
        max_batch,
        cache_bytes=cache_bytes,
        prefix_bytes=prefix_bytes,
    )
