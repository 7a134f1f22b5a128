"""The frame of every program of the package: it reads the arguments and ends the program.

Whatever goes wrong for a user ends a program with one sentence and an exit code, never with a traceback.
"""

import argparse
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib.metadata import version
from itertools import takewhile
from typing import Any, NoReturn

from .extras import PACKAGE, install_command
from .interruption import Terminated, heeded
from .settings import CONFIG, CONFIG_HELP, Given, given_elsewhere

EXIT_ERROR, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE, EXIT_TERMINATED = 2, 130, 141, 143
INTERRUPTIONS = {signal.SIGINT: (EXIT_INTERRUPTED, "interrupted"), signal.SIGTERM: (EXIT_TERMINATED, "terminated")}
EXPORT_ONLY = ("transformers", "safetensors", "onnx", "onnx_ir", "onnxscript", "huggingface_hub")
NEAR = 0.7  # how like a flag or a choice a word must be to be taken for it
NO_MEMORY = "can't allocate memory"  # torch raises a plain RuntimeError that says so


class Parser(argparse.ArgumentParser):
    """A parser that refuses in one line, without the usage."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self._given: list[Given] = []  # in the environment, or in a file

    def read_all(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Parse the arguments, and take what they leave open from the environment and from a file of settings."""
        argv = sys.argv[1:] if argv is None else argv
        self.add_argument(f"--{CONFIG}", metavar="F", help=CONFIG_HELP)
        self.usage = " ".join([self.prog, *filter(None, map(_needed, self._actions)), "[options]"])
        self._given = given_elsewhere(self._actions, argv)
        before = []
        for one in self._given:
            if one.action.option_strings:
                before += one.arguments()
            else:
                one.action.default, one.action.nargs, one.action.required = one.value, "?", False
        for word in before:
            self._require_text(word, "a setting")
        found = self.read(argv, before)
        delattr(found, CONFIG)
        return found

    def read(self, argv: Sequence[str] | None, before: Sequence[str] = ()) -> argparse.Namespace:
        """Parse the arguments, once they are known to be text that can be a prompt or name a file."""
        argv = sys.argv[1:] if argv is None else argv
        for number, argument in enumerate(argv, 1):
            self._require_text(argument, f"argument {number}")
        self._refuse_unknown(argv)
        return self.parse_args([*before, *argv])

    def _refuse_unknown(self, argv: Sequence[str]) -> None:
        """Name flags that do not exist, with the nearest that does, before argparse asks for what is missing."""
        if any(action.nargs == argparse.REMAINDER for action in self._actions):
            return  # whose flags they are
        words = [word for word in takewhile(lambda word: word != "--", argv) if word.startswith("--")]
        unknown = [word for word in words if word.partition("=")[0] not in self._option_string_actions]
        unknown = [word for word in unknown if " " not in word]  # else it is a value
        if unknown:
            near = get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, 1, NEAR)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{_meant(near)}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            known = list(map(str, action.choices))
            listed = ", ".join(map(repr, known))
            meant = _meant(get_close_matches(str(value), known, 1, NEAR))
            raise argparse.ArgumentError(action, f"invalid choice: {value!r} (choose from {listed}){meant}")

    def _require_text(self, word: str, place: str) -> None:
        try:
            word.encode("utf-8", "surrogateescape")  # allows bytes of a shell that are not UTF-8
        except UnicodeEncodeError as error:
            found = word[error.start]
            self.error(f"{place} holds {found!r}, which is not a character of Unicode; leave it out")
        if "\0" in word:
            self.error(f"{place} holds a NUL, which no path and no prompt may; leave it out")

    def error(self, message: str) -> NoReturn:
        source = next((one.source for one in self._given if f"argument --{one.name}:" in message), None)
        if source is not None:
            message += f" (set by {source})"
        _report(self.prog.partition(" ")[0], f"error: {message}; see {self.prog} --help")
        self.exit(EXIT_ERROR)


def _meant(near: Sequence[str]) -> str:
    return f"; did you mean {near[0]}?" if near else ""


def _needed(action: argparse.Action) -> str | None:
    """How the usage shows what has to be given, or what has no flag."""
    value = action.metavar if isinstance(action.metavar, str) else f"{{{','.join(map(str, action.choices or ()))}}}"
    if not action.option_strings:
        return value if action.required else f"[{value}]"
    return f"{action.option_strings[0]} {value}" if action.required else None


def program(
    name: str,
    description: str | None,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], int],
) -> Callable[..., int]:
    """Make the main function of a program that is run as a module; it takes arguments in place of the shell's."""

    def main(argv: Sequence[str] | None = None) -> int:
        parser = Parser(prog=name, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        add_arguments(parser)
        return exit_code(name, lambda: run(parser.read_all(argv)))

    return main


def version_of(program: str) -> str:
    return f"{program} {version(PACKAGE)}"


def exit_code(program: str, run: Callable[[], int], left: Callable[[], str] = str) -> int:
    """Run a program and return its exit code; `left` says on an interruption what was left behind."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a model may write what the terminal cannot show
    with heeded() as came:
        try:
            try:
                code = run()
            finally:
                sys.stdout.flush()
        except (KeyboardInterrupt, Terminated) as ending:
            came.append(signal.SIGTERM if isinstance(ending, Terminated) else signal.SIGINT)
        except BrokenPipeError:
            # Python flushes stdout once more at exit, and nobody reads it.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_BROKEN_PIPE
        except Exception as error:
            if not came:  # else a library has made it of the interruption
                sentence = _sentence(error)
                if sentence is None:
                    raise
                _report(program, f"error: {sentence}")
                return EXIT_ERROR
    if not came:
        return code
    code, word = INTERRUPTIONS[signal.Signals(came[0])]
    _report(program, f"{word}{left()}")
    return code


def _sentence(error: Exception) -> str | None:
    """Return what to tell the user, or None for a bug of ours, which keeps its traceback."""
    from ..engines import TrtSpecError
    from ..engines.errors import first_line

    if isinstance(error, TrtSpecError):
        return str(error)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and NO_MEMORY in str(error)):
        return f"this machine has not enough memory for it ({first_line(error)}); ask for less at once"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'a file'} cannot be used ({error.strerror}); choose another place, or mend this one"
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        if package in EXPORT_ONLY:
            return f"checkpoints are read with {package}, which is not installed; {install_command('export')}"
    return None


def _report(program: str, message: str) -> None:
    """Print one line that every terminal can show, whatever names the message quotes."""
    shown = "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in message)
    print(f"{program}: {shown}", file=sys.stderr)
