"""Talk to a model in the terminal. What the draft wrote is dimmed, and each answer ends with its speed.

An empty line does nothing; the end of the input (Ctrl-D) ends the conversation.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from ...engines import EngineError, RequestError
from ...runtime import Decoder, Output, Piece, SamplingParams
from ..console import say
from ..extras import install_command
from ..flags.controller import add_controller_flags, draft_length
from ..flags.engine import add_engine_flags, open_decoder
from ..flags.sampling import add_sampling_flags, sampling_params
from ..in_words import lossy, summary
from ..text_files import read_text
from ..trace_lines import RESET

KEPT_BYTES = 2**28  # of the conversation so far, with which each prompt begins
DIM = "\x1b[2m"
Conversation = list[dict[str, str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bundle", required=True, metavar="B", type=Path, help="the folder that export-models wrote")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    parser.add_argument(
        "--chat-template", metavar="F", type=Path, help="a jinja file to use instead of the bundle's chat template"
    )
    add_engine_flags(parser)
    add_controller_flags(parser)
    add_sampling_flags(parser, temperature=1.0, max_new_tokens=512)


def run(arguments: argparse.Namespace) -> int:
    try:
        from ..serving.templates import ChatTemplate
    except ModuleNotFoundError as error:
        raise EngineError(f"chat needs {error.name}, which is not installed; {install_command('serve')}") from error
    params = sampling_params(arguments)
    given = None if arguments.chat_template is None else read_text(arguments.chat_template, "chat template")
    with open_decoder(arguments, max_batch=1, prefix_bytes=KEPT_BYTES) as decoder:
        source = given or decoder.bundle.tokenizer.chat_template
        if source is None:
            raise RequestError(f"bundle {arguments.bundle} has no chat template; give one with --chat-template FILE")
        template = ChatTemplate(source, decoder.tokenizer, decoder.bundle.tokenizer)
        told: Conversation = [{"role": "system", "content": arguments.system}] if arguments.system else []
        for line in _lines():
            told.append({"role": "user", "content": line})
            with _no_typing():
                output = _answer(decoder, template.encode(told), params, arguments)
            told.append({"role": "assistant", "content": output.text})
    if params.lenient:
        say(lossy(params.lenience))
    return 0


def _lines() -> Iterator[str]:
    """Yield the user's lines; the prompt is shown on a terminal only."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        if not (line := sys.stdin.readline()):
            return
        if line.strip():
            yield line.rstrip("\n")


@contextmanager
def _no_typing() -> Iterator[None]:
    """Neither show nor keep what is typed into a terminal meanwhile: it would mix into the answer."""
    import termios

    try:
        before = termios.tcgetattr(sys.stdin)
    except (termios.error, OSError):  # it is no terminal
        yield
        return
    silent = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSAFLUSH, before)


def _answer(decoder: Decoder, prompt: list[int], params: SamplingParams, arguments: argparse.Namespace) -> Output:
    room = decoder.bundle.max_length - len(prompt)
    if room < 1:
        raise RequestError(f"the conversation fills the model's {decoder.bundle.max_length} tokens; begin another")
    params = replace(params, max_new_tokens=min(params.max_new_tokens, room))
    request = decoder.submit(prompt, params, draft_length=draft_length(arguments), drafter=arguments.drafter)
    ink = Ink(sys.stdout, decoder.tokenizer)
    while not request.finished:
        decoder.step()
        for piece in request.take():
            ink.write(piece)
    output = request.output()
    print(flush=True)
    say(f"{len(output.token_ids) / output.seconds:.1f} tokens/s; {summary(output.speculation)}")
    return output


class Ink:
    """Writes pieces as they come; on a terminal, what the draft proposed is dimmed."""

    def __init__(self, stream: TextIO, tokenizer: Any) -> None:
        self._stream, self._tokenizer = stream, tokenizer
        self._dims = stream.isatty() and not os.environ.get("NO_COLOR")

    def write(self, piece: Piece) -> None:
        drafted, own = self._parts(piece)
        self._stream.write(f"{DIM}{drafted}{RESET}{own}" if self._dims and drafted else piece.text)
        self._stream.flush()

    def _parts(self, piece: Piece) -> tuple[str, str]:
        """Split a piece's text into what the draft proposed and the target's own token, which comes last."""
        if piece.from_draft and piece.from_draft[-1]:
            return piece.text, ""
        own = self._tokenizer.decode(piece.token_ids[-1:], skip_special_tokens=True) if any(piece.from_draft) else ""
        if own and piece.text.endswith(own):
            return piece.text[: -len(own)], own
        return ("", piece.text)
