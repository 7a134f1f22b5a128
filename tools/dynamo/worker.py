"""A worker of NVIDIA Dynamo, whose frontend takes the requests, routes them, and moves them when a worker dies.

    python -m trt_spec.tools.dynamo.worker --bundle bundle
    python -m dynamo.frontend --discovery-backend file --router-mode kv --migration-limit 3

A text that moves goes on as it would have, greedily and under rule coupled; under rule rejection it goes on exactly
distributed.
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import chdir
from functools import partial
from pathlib import Path
from typing import Any

from ...engines import EngineError
from ...runtime.acceptance.parameter_fields import RULES
from ..extras import install_command
from ..flags.engine import add_engine_flags, open_decoder
from ..flags.images import add_image_hosts_flag
from ..flags.limits import add_limit_flags, seconds
from ..program import Parser, exit_code
from ..serving.stepper import BROKEN
from .images import counted_by_router
from .requests import card_of

PROGRAM = "trt_spec.tools.dynamo.worker"


def parser() -> Parser:
    flags = Parser(prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--bundle", required=True, metavar="B", type=Path, help="the folder that export-models wrote")
    flags.add_argument("--served-model-name", metavar="NAME", help="what clients call it (default: the target's name)")
    flags.add_argument(
        "--rule", choices=RULES, default=RULES[0], help=f"how proposals are accepted (default {RULES[0]})"
    )
    add_image_hosts_flag(flags)
    add_limit_flags(flags)
    flags.add_argument(
        "--drain-seconds",
        default=15.0,
        type=seconds,
        metavar="S",
        help="after SIGTERM, let other workers go on with what has not finished in this time (default 15; Dynamo waits "
        "5 seconds before, and ends the worker after DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT, by default 30)",
    )
    add_engine_flags(flags)
    group = flags.add_argument_group("Dynamo", "what these mean is said in its own documentation")
    group.add_argument("--namespace", default="dynamo", metavar="NAME", help="(default dynamo)")
    group.add_argument("--component", default="trt-spec", metavar="NAME", help="(default trt-spec)")
    group.add_argument("--endpoint", default="generate", metavar="NAME", help="(default generate)")
    group.add_argument(
        "--discovery-backend",
        choices=("file", "etcd", "kubernetes", "mem"),
        default="file",
        help="how frontend and workers find each other (default file, for one machine)",
    )
    group.add_argument("--request-plane", choices=("tcp", "nats"), default="tcp", help="(default tcp)")
    group.add_argument("--event-plane", choices=("zmq", "nats"), default="zmq", help="(default zmq)")
    return flags


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code(PROGRAM, partial(_run, argv))


def _run(argv: Sequence[str] | None) -> int:
    arguments = parser().read(argv)
    try:
        from dynamo.common.backend.run import run

        from .engine import DynamoEngine
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        raise EngineError(
            f"a worker of Dynamo needs {package}, which is not installed; {install_command('dynamo')}"
        ) from error
    arguments.bundle = arguments.bundle.resolve()
    limits = (arguments.max_batch, arguments.cache_memory, arguments.prefix_memory or None)
    with open_decoder(arguments, *limits) as decoder:
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            name, *_ = counted_by_router(decoder.bundle)
            card = Path(name)  # relative, because Dynamo lets no worker in whose path is another
            card.mkdir()
            for file, text in card_of(decoder.bundle, decoder.tokenizer, arguments.rule).items():
                (card / file).write_text(text, encoding="utf-8")

            engine = DynamoEngine(decoder, card, arguments)

            async def made(_: object) -> tuple[Any, Any]:
                return engine, engine.worker_config()

            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Dynamo drains, and would call our handler as well
            run(DynamoEngine, engine_factory=made)
        engine.stepper.leave_if_stuck()  # the folder is gone by now
        return 0 if engine.stepper.error is None else BROKEN


if __name__ == "__main__":
    sys.exit(main())
