"""Where prompts come from: the command line, a file, standard input, or the few that are shipped."""

import argparse
import json
import sys
from pathlib import Path

from ...engines import RequestError

PYTHON_PROMPTS = (
    'def read_config(path):\n    """Read a configuration file and return a dictionary."""\n',
    '@property\ndef name(self):\n    """Return the name of the node."""\n    return self._name\n\n@property\ndef ',
    "def __eq__(self, other):\n    if not isinstance(other, ",
    "import os\nimport sys\nimport argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser(",
    'class Stack:\n    """A last-in, first-out container."""\n\n    def __init__(self):\n        self._items = []\n',
    "    for key, value in sorted(items.items()):\n        if value is None:\n            ",
)


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", metavar="TEXT", help="the text to complete")
    parser.add_argument("--prompt-file", metavar="F", type=Path, help="a UTF-8 file that holds it")
    parser.add_argument("stdin", nargs="?", metavar="-", help="read it from standard input")


def chosen_prompt(arguments: argparse.Namespace) -> str:
    prompt, file, stdin = arguments.prompt, arguments.prompt_file, arguments.stdin
    if stdin not in (None, "-"):
        raise RequestError(f"{stdin!r} was not expected here; a prompt follows --prompt")
    if sum(source is not None for source in (prompt, file, stdin)) != 1:
        raise RequestError("the prompt has to come from one place: --prompt TEXT, --prompt-file F, or - for stdin")
    if prompt is not None:
        return _decode(prompt.encode("utf-8", "surrogateescape"), "--prompt")
    return read_text(file) if file else _decode(sys.stdin.buffer.read(), "standard input")


def read_prompts(path: Path) -> list[str]:
    """One prompt a line: plain text, or objects with a "prompt" where the name ends in .jsonl."""
    lines = [line for line in read_text(path).splitlines() if line.strip()]
    if not lines:
        raise RequestError(f"prompt file {path} holds no prompt, expected one a line")
    if path.suffix == ".jsonl":
        return [_prompt_of(path, number, line) for number, line in enumerate(lines, 1)]
    return lines


def _prompt_of(path: Path, number: int, line: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, TypeError, KeyError):
        prompt = None
    if not isinstance(prompt, str):
        raise RequestError(f'prompt {number} of {path} is {line[:40]!r}, expected an object like {{"prompt": "text"}}')
    return prompt


def read_text(path: Path, kind: str = "prompt file") -> str:
    try:
        return _decode(path.read_bytes(), f"{kind} {path}")
    except OSError as error:
        raise RequestError(f"{kind} {path} cannot be read ({error.strerror}); give another") from error


def _decode(content: bytes, source: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{source} is no UTF-8: byte {error.start} is 0x{content[error.start]:02x}; convert it first"
        ) from error
