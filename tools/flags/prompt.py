"""The flags that say which text to complete, or which set of prompts to measure on."""

import argparse
import sys
from pathlib import Path

from ...engines import Bundle, RequestError
from ...runtime.acceptance.parameter_fields import ParameterFields
from ...runtime.requests.bounds import refuse_long
from ..prompts.shipped import KINDS
from ..text_files import decoded, read_prompts, read_text


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", metavar="TEXT", help="the text to complete")
    parser.add_argument("--prompt-file", metavar="F", type=Path, help="a UTF-8 file that holds the text to complete")
    parser.add_argument("stdin", nargs="?", metavar="-", help="read the text to complete from standard input")


def add_source_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", metavar="TEXT", help="what the encoder reads, where the bundle has one")
    parser.add_argument("--source-file", metavar="F", type=Path, help="a UTF-8 file that holds it")


def chosen_source(arguments: argparse.Namespace) -> str | None:
    if arguments.source is not None and arguments.source_file is not None:
        raise RequestError("--source and --source-file both say what the encoder reads; leave one out")
    if arguments.source is not None:
        return decoded(arguments.source.encode("utf-8", "surrogateescape"), "--source")
    return read_text(arguments.source_file, "source file") if arguments.source_file else None


def chosen_prompt(arguments: argparse.Namespace, needed: bool = True) -> str:
    prompt, file, stdin = arguments.prompt, arguments.prompt_file, arguments.stdin
    if not needed and prompt is file is stdin is None:
        return ""
    if stdin not in (None, "-"):
        raise RequestError(f"{stdin!r} was not expected here; a prompt follows --prompt")
    if sum(source is not None for source in (prompt, file, stdin)) != 1:
        raise RequestError("the prompt has to come from one place: --prompt TEXT, --prompt-file F, or - for stdin")
    if prompt is not None:
        return decoded(prompt.encode("utf-8", "surrogateescape"), "--prompt")
    return read_text(file) if file else decoded(sys.stdin.buffer.read(), "standard input")


def refuse_prompt(bundle: Bundle, prompt: str, params: ParameterFields) -> None:
    """Refuse a text without tokens, or with too many; it is tokenised only where its length makes that possible."""
    if prompt and len(prompt.encode()) + params.max_new_tokens <= bundle.max_length:
        return
    from ...runtime.requests.prompts import encode, read_tokenizer

    ids = encode(prompt, read_tokenizer(bundle), bundle.tokenizer.vocab_size)
    refuse_long(bundle, params.max_new_tokens, len(ids))


def refuse_prompts(source: str) -> None:
    """Refuse a file of prompts that cannot be read."""
    if source not in KINDS:
        read_prompts(Path(source))


def add_prompts_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompts",
        metavar="KIND|F",
        default="python",
        help=f"what to complete: shipped prompts, which are {', '.join(KINDS)} (default python); or a file with a "
        'prompt on each line, or with {"prompt": "text"} on each line of a .jsonl',
    )
