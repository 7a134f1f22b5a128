"""The command `trt-spec`: finds the command that was asked for and runs it."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module

from .program import Parser, exit_code, version_of

COMMANDS = {  # each is a module in commands/ with add_arguments(parser) and run(arguments) -> exit code
    "demo": "watch a draft model make a target faster, with the same text",
    "generate": "complete a prompt",
    "bench": "measure draft lengths against each other and against what theory predicts",
    "tune": "measure what rounds cost, so that the draft length can choose itself",
    "inspect": "show what is in a bundle and the memory it needs",
    "build": "compile TensorRT plans for a bundle",
    "ngram": "count the n-grams of a text into a bundle, for drafts that cost nothing",
    "verify": "certify that a bundle, in an engine on this machine, is lossless",
    "plan": "calculate what speculation yields from an acceptance and the costs of a round",
    "families": "show which model families can be exported, and why the others cannot",
    "doctor": "show what this machine can run, what is missing, and how to get it",
}


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code("trt-spec", partial(_run, argv))


def _run(argv: Sequence[str] | None) -> int:
    chosen = _commands_parser().read(argv)
    command = import_module(f".commands.{chosen.command}", __package__)
    parser = Parser(prog=f"trt-spec {chosen.command}", description=command.__doc__)
    command.add_arguments(parser)
    status: int = command.run(parser.read(chosen.arguments))
    return status


def _commands_parser() -> Parser:
    listing = "\n".join(f"  {name:<10}{summary}" for name, summary in COMMANDS.items())
    parser = Parser(
        prog="trt-spec",
        description="Lossless speculative decoding: the same text, sooner.",
        epilog=f"commands:\n{listing}\n\ntrt-spec COMMAND --help shows the options of each.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=version_of("trt-spec"))
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the commands below")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    rest.required = False
    return parser


if __name__ == "__main__":
    sys.exit(main())
