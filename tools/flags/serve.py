"""The flags of `trt-spec serve`."""

import argparse
from pathlib import Path

from ...runtime.acceptance.parameter_fields import RULES
from .adapters import named_adapter
from .controller import add_controller_flags
from .engine import add_engine_flags
from .groups import LIMITS, SAMPLING, SPECULATION, group
from .images import add_image_hosts_flag, not_blank
from .limits import add_limit_flags, seconds
from .revision import add_revision_flag
from .sampling import add_number, positive

KINDS = ("auto", "none", "int8", "int4", "fp8")  # of stored weights; nvfp4 is for plans, built before they are served


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a bundle, or a checkpoint as export-models takes it, which is exported into the user's cache once "
        "(default: the shipped demo pair)",
    )
    parser.add_argument("--bundle", metavar="B", type=Path, help="a bundle, as MODEL")
    parser.add_argument("--host", default="127.0.0.1", metavar="H", help="where to listen (default 127.0.0.1)")
    parser.add_argument("--port", default=8000, type=_port, metavar="N", help="where to listen (default 8000; 0: any)")
    parser.add_argument(
        "--metrics-port",
        type=_port,
        metavar="N",
        help="serve /metrics here, without a key and nowhere else, with /health and /ready",
    )
    parser.add_argument(
        "--served-model-name",
        metavar="NAME",
        action="append",
        type=not_blank,
        default=[],
        help="what clients call it; may be repeated (default: the target's name)",
    )
    parser.add_argument(
        "--adapter",
        metavar="NAME=DIR",
        action="append",
        type=named_adapter,
        default=[],
        help="serve this LoRA adapter, too: requests name it as their model; may be repeated",
    )
    parser.add_argument(
        "--adapters-from",
        metavar="DIR",
        type=Path,
        help="let clients load adapters from folders in this one, by POST /v1/load_lora_adapter (default: they cannot)",
    )
    parser.add_argument(
        "--chat-template", metavar="F", type=Path, help="a jinja file to use instead of the bundle's chat template"
    )
    add_image_hosts_flag(parser)
    parser.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        help="tell reasoning from answers by the marks of deepseek_r1, qwen3, glm45, granite, seed_oss or mistral",
    )
    made = parser.add_argument_group("if MODEL is a checkpoint")
    made.add_argument(
        "--draft", metavar="DIR_OR_ID", action="append", default=[], help="a smaller one that drafts; may be repeated"
    )
    add_revision_flag(made, "MODEL")
    made.add_argument(
        "--tensor-parallel",
        type=positive,
        default=1,
        metavar="N",
        help="split it into so many shards, which as many devices run together in engine torch (default 1)",
    )
    made.add_argument(
        "--weights",
        choices=KINDS,
        default="auto",
        help="quantise the matrices of all models (default auto: the blocks of a GGUF file of Q4_0, Q4_1, Q4_K, Q6_K "
        "or Q8_0 are kept, else none)",
    )
    access = parser.add_argument_group("who may ask")
    access.add_argument(
        "--api-key",
        metavar="KEY",
        action="append",
        type=_no_empty,
        default=[],
        help="a key that clients have to send; may be repeated (default: everybody is let in)",
    )
    access.add_argument(
        "--api-key-file", metavar="F", type=_file, help="a file of keys, one a line; # begins a comment"
    )
    for name, of in (
        ("--requests-per-minute", "requests that each key may make in a minute; more are refused with 429"),
        ("--rows-per-key", "completions that each key may have under way or waiting; more are refused with 429"),
    ):
        access.add_argument(name, metavar="N", type=positive, help=f"{of} (default: no limit)")
    access.add_argument(
        "--allow-origin",
        metavar="ORIGIN",
        action="append",
        type=not_blank,
        default=[],
        help="let pages of this origin, such as https://example.com, ask from a browser; may be repeated; '*': all",
    )
    access.add_argument("--ssl-certfile", metavar="F", type=_file, help="serve https with this certificate, a PEM file")
    access.add_argument("--ssl-keyfile", metavar="F", type=_file, help="its key (default: in the same file)")
    defaults = group(parser, SAMPLING)
    defaults.add_argument(
        "--generation-config",
        action="store_true",
        help="let what a request leaves open be as the checkpoint's generation_config.json recommends (default: "
        "temperature 1, and no filter)",
    )
    add_controller_flags(parser)
    group(parser, SPECULATION).add_argument(
        "--rule", choices=RULES, default="rejection", help="how proposals are accepted (default rejection)"
    )
    add_limit_flags(parser)
    limits = group(parser, LIMITS)
    limits.add_argument(
        "--max-length",
        "--max-model-len",
        metavar="N",
        type=positive,
        help="the most tokens of prompt and output together (default: as many as the models have positions for)",
    )
    add_number(limits, "--max-waiting", 256, "requests that may wait for a place; more are refused with 503")
    add_number(
        limits, "--drain-seconds", 30.0, "after SIGTERM, cancel what has not finished in this time", seconds, letter="S"
    )
    add_engine_flags(parser)
    logged = parser.add_argument_group("log, on standard error")
    logged.add_argument("--log-format", choices=("text", "json"), default="text", help="a line for each request")
    logged.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="(default info)"
    )
    logged.add_argument("--log-prompts", action="store_true", help="log what clients send, too")


def _no_empty(text: str) -> str:
    """Refuse to be protected by nothing, which a variable that is not set comes to."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty, so that nothing would be protected; give a value")
    return text


def _file(text: str) -> Path:
    return Path(_no_empty(text))


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) < 2**16):
        raise argparse.ArgumentTypeError(f"{text[:20]!r}, expected a number from 0 to 65535")
    return int(text)
