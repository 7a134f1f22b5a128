"""The command `trt-spec`: finds the command, runs it, turns what goes wrong into one sentence and an exit code."""

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any, NoReturn

COMMANDS = {  # each is a module in commands/ with add_arguments(parser) and run(arguments) -> exit code
    "demo": "watch a draft model make a target faster, with the same text",
    "generate": "complete a prompt",
    "bench": "measure draft lengths against each other and against what theory predicts",
    "tune": "measure what rounds cost over K and batch, so that the draft length can choose itself",
    "inspect": "show what is in a bundle and the memory it needs",
    "build": "compile TensorRT plans for a bundle",
    "ngram": "count the n-grams of a text into a bundle, for drafts that cost nothing",
    "verify": "certify that a bundle, in an engine on this machine, is lossless",
    "plan": "calculate what speculation yields from an acceptance and the costs of a round",
    "families": "show which model families can be exported, and why the others cannot",
    "doctor": "show what this machine can run, what is missing, and how to get it",
}

EXIT_ERROR, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE, EXIT_TERMINATED = 2, 130, 141, 143


class Parser(argparse.ArgumentParser):
    """Refuses in one line, without the usage."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        _report(f"error: {message}; see {self.prog} --help")
        self.exit(EXIT_ERROR)


def main(argv: Sequence[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a model may write what the terminal cannot show
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        try:
            status = _run(argv)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        _report("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more at exit, and nobody reads it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except Exception as error:
        from ..engines import TrtSpecError

        if not isinstance(error, TrtSpecError):
            raise
        _report(f"error: {error}")
        return EXIT_ERROR
    finally:
        signal.signal(signal.SIGTERM, previous)
    return status


def _run(argv: Sequence[str] | None) -> int:
    chosen = _commands_parser().parse_args(argv)
    command = import_module(f".commands.{chosen.command}", __package__)
    parser = Parser(prog=f"trt-spec {chosen.command}", description=command.__doc__)
    command.add_arguments(parser)
    status: int = command.run(parser.parse_args(chosen.arguments))
    return status


def _commands_parser() -> argparse.ArgumentParser:
    listing = "\n".join(f"  {name:<10}{summary}" for name, summary in COMMANDS.items())
    parser = Parser(
        prog="trt-spec",
        description="Lossless speculative decoding: the same text, sooner.",
        epilog=f"commands:\n{listing}\n\ntrt-spec COMMAND --help shows the options of each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"trt-spec {version('trt-spec')}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the commands below")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    rest.required = False
    return parser


def _report(message: str) -> None:
    print(f"trt-spec: {message}", file=sys.stderr)


def _terminate(*_: object) -> NoReturn:
    """SIGTERM as an exception: what is half-written is removed on its way out."""
    sys.exit(EXIT_TERMINATED)


if __name__ == "__main__":
    sys.exit(main())
