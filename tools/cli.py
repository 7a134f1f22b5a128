"""The command `trt-spec`: finds the command that was asked for and runs it."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from types import ModuleType

from .flags.paths import refuse_absent
from .flags.torchrun import follow, rank_by_torchrun
from .program import Parser, exit_code, version_of

COMMANDS = {  # each is a module in commands/ with run(arguments) -> exit code, and most have add_arguments(parser)
    "demo": "watch a draft model make a target faster, with the same text",
    "generate": "complete a prompt",
    "transcribe": "write down what is said in sound files",
    "serve": "answer many clients at once by OpenAI's API",
    "chat": "talk to a model in the terminal",
    "bench": "measure the speed of each draft length, and compare it with what theory predicts",
    "tune": "measure what rounds cost here, so that the draft length can be chosen for you",
    "inspect": "show what is in a bundle and the memory it needs",
    "build": "compile TensorRT plans for a bundle",
    "train": "teach a draft or a head what its target says",
    "ngram": "add the n-grams of a text to a bundle, for drafts that need no model",
    "verify": "check that a bundle says exactly what its target alone would say",
    "plan": "calculate the speed-up to expect from an acceptance and the costs of a round",
    "families": "show which model families can be exported, and why the others cannot",
    "doctor": "show what this machine can run, what is missing, and how to get it",
}
FLAGS_APART = ("bench", "train", "tune", "verify")  # those whose flags are in flags/: their own modules load torch


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code("trt-spec", partial(_run, argv))


def _run(argv: Sequence[str] | None) -> int:
    chosen = _commands_parser().read(argv)
    described = described_by(chosen.command)
    parser = Parser(prog=f"trt-spec {chosen.command}", description=described.__doc__)
    described.add_arguments(parser)
    arguments = parser.read_all(chosen.arguments)
    refuse_absent(arguments)
    if (rank := rank_by_torchrun()) > 0:
        follow(arguments, rank)
    if chosen.command in FLAGS_APART:
        described.refuse(arguments)
    status: int = import_module(f".commands.{chosen.command}", __package__).run(arguments)
    return status


def described_by(command: str) -> ModuleType:
    """Return the module that says what a command is for, and has its flags."""
    room = "flags" if command in FLAGS_APART else "commands"
    return import_module(f".{room}.{command}", __package__)


def _commands_parser() -> Parser:
    listing = "\n".join(f"  {name:<11}{summary}" for name, summary in COMMANDS.items())
    parser = Parser(
        prog="trt-spec",
        description="Lossless speculative decoding: a small draft model proposes tokens, the large target checks\n"
        "them, and you get the target's own text, sooner. export-models makes the bundles that most commands take.",
        epilog=f"commands:\n{listing}\n\ntrt-spec COMMAND --help shows the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=version_of("trt-spec"))
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the commands below")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    rest.required = False
    return parser


if __name__ == "__main__":
    sys.exit(main())
