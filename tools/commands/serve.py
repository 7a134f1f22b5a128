"""Serve a bundle to many clients at once, by OpenAI's API: completions, chats, streams.

SIGTERM ends it gracefully: it takes nothing new, finishes what runs, and exits with 0.
"""

import argparse
import re
from pathlib import Path

from ...engines import EngineError, RequestError
from ..console import say
from ..extras import install_command
from ..flags.engine import add_engine_flags, open_decoder
from ..flags.sampling import batch_size, positive
from ..text_files import read_text

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bundle",
        metavar="B",
        type=Path,
        help="the folder that export-models wrote (default: the shipped demo pair, exported on first use)",
    )
    parser.add_argument("--host", default="127.0.0.1", metavar="H", help="where to listen (default 127.0.0.1)")
    parser.add_argument("--port", default=8000, type=_port, metavar="N", help="where to listen (default 8000; 0: any)")
    parser.add_argument("--served-model-name", metavar="NAME", help="what clients call it (default: the target's name)")
    parser.add_argument(
        "--api-key-file", metavar="F", type=Path, help="a file with a key on each line; without one everybody is let in"
    )
    parser.add_argument(
        "--chat-template", metavar="F", type=Path, help="a jinja file to use instead of the bundle's chat template"
    )
    parser.add_argument(
        "--max-batch", default=8, type=batch_size, metavar="N", help="requests to decode together (default 8)"
    )
    parser.add_argument(
        "--max-waiting",
        default=256,
        type=positive,
        metavar="N",
        help="requests that may wait for a place; more are refused with 503 (default 256)",
    )
    parser.add_argument(
        "--cache-memory", type=_bytes, metavar="SIZE", help="the most memory for both caches, for instance 2GiB"
    )
    parser.add_argument(
        "--prefix-memory",
        type=_bytes,
        default=2**28,
        metavar="SIZE",
        help="the most memory beside it for what requests leave to others that begin alike (default 256MiB; 0: none)",
    )
    parser.add_argument(
        "--drain-seconds",
        default=30.0,
        type=_seconds,
        metavar="S",
        help="after SIGTERM, cancel what has not finished in this time (default 30)",
    )
    add_engine_flags(parser)
    group = parser.add_argument_group("log, on standard error")
    group.add_argument("--log-format", choices=("text", "json"), default="text", help="a line for each request")
    group.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="(default info)"
    )
    group.add_argument("--log-prompts", action="store_true", help="log what clients send, too")


def run(arguments: argparse.Namespace) -> int:
    try:
        from ..serving.access_log import set_up_logging
        from ..serving.app import make_app
        from ..serving.open_service import open_service
        from ..serving.server import address, listen, serve
    except ModuleNotFoundError as error:
        raise EngineError(f"serving needs {error.name}, which is not installed; {install_command('serve')}") from error
    keys = None if arguments.api_key_file is None else read_keys(arguments.api_key_file)
    template = None if arguments.chat_template is None else read_text(arguments.chat_template, "chat template")
    if arguments.bundle is None:
        from ..making.demo_bundle import demo_bundle

        arguments.bundle = demo_bundle(say)
    with (
        listen(arguments.host, arguments.port) as listener,
        open_decoder(
            arguments, arguments.max_batch, arguments.cache_memory, arguments.prefix_memory or None
        ) as decoder,
    ):
        set_up_logging(arguments.log_format, arguments.log_level)
        service = open_service(decoder, arguments.max_waiting, arguments.served_model_name, template)
        app = make_app(service, keys or (), arguments.log_prompts)
        line = f"trt-spec serves {service.name} with {decoder.engine} on {arguments.device} at {address(listener)}"
        serve(app, service, listener, arguments.drain_seconds, lambda: say(line))
    return 0


def read_keys(file: Path) -> list[str]:
    """Read a key from each line."""
    keys = [line.strip() for line in read_text(file, "--api-key-file").splitlines() if line.strip()]
    if not keys:
        raise RequestError(f"{file} holds no key; put one on each line, or leave --api-key-file out")
    return keys


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) < 2**16):
        raise argparse.ArgumentTypeError(f"{text[:20]!r}, expected a number from 0 to 65535")
    return int(text)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d{1,15})\s*([KMG]i?B|)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text[:20]!r}, expected a size like 500MB or 2GiB")
    return int(found[1]) * UNITS[found[2]]


def _seconds(text: str) -> float:
    if not re.fullmatch(r"\d{1,6}(\.\d{1,6})?", text):
        raise argparse.ArgumentTypeError(f"{text[:20]!r}, expected a number of seconds")
    return float(text)
