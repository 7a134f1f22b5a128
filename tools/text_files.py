"""Read texts and prompts from files, and refuse in a sentence what cannot be read."""

import json
from pathlib import Path

from ..engines import RequestError


def read_prompts(path: Path) -> list[str]:
    """Read a prompt from each line: plain text, or an object with a "prompt" if the name ends in .jsonl.

    Only \\n and \\r\\n end a line: JSON may hold U+2028 and its like unescaped.
    """
    lines = [line for line in read_text(path).replace("\r\n", "\n").split("\n") if line.strip()]
    if not lines:
        raise RequestError(f"prompt file {path} holds no prompt, expected one a line")
    if path.suffix == ".jsonl":
        return [_prompt_of(path, number, line) for number, line in enumerate(lines, 1)]
    return lines


def _prompt_of(path: Path, number: int, line: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
        prompt.encode()  # JSON may spell half of a surrogate pair
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise RequestError(
            f'prompt {number} of {path} is {line[:40]!r}, expected an object like {{"prompt": "text"}}'
        ) from None
    found: str = prompt
    return found


def read_text(path: Path, kind: str = "prompt file") -> str:
    try:
        return decoded(path.read_bytes(), f"{kind} {path}")
    except OSError as error:
        raise RequestError(f"{kind} {path} cannot be read ({error.strerror}); give another") from error


def decoded(content: bytes, source: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{source} is not UTF-8: byte {error.start} is 0x{content[error.start]:02x}; convert it first"
        ) from error
