"""Talk to a model in the terminal. What the draft wrote is dimmed, and each answer ends with its speed.

The line /image FILE shows an image with your next line to a model that sees. An empty line does nothing; the end of
the input (Ctrl-D) ends the conversation.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...engines import Bundle, RequestError
from ...runtime import Output
from ...runtime.images.picture import Picture, more_tokens
from ...runtime.requests.bounds import refuse_foreign_tokens, refuse_source
from ..console import say
from ..flags.adapters import add_adapter_flag, loaded_adapter, refuse_adapters
from ..flags.controller import add_controller_flags, draft_length, refuse_drafting, refuse_lacking
from ..flags.engine import add_engine_flags, engine_name, open_decoder
from ..flags.images import read_image, said_with_images
from ..flags.sampling import add_sampling_flags, given_fields, sampling_params
from ..flags.templates import add_template_flags, beginning, template_of, template_source
from ..in_words import lossy, summary
from ..ink import Ink

if TYPE_CHECKING:
    from ...runtime import Decoder, SamplingParams

IMAGE = "/image "
KEPT_BYTES = 2**28  # of the conversation so far, with which each prompt begins


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bundle", required=True, metavar="B", type=Path, help="the folder that export-models wrote")
    add_template_flags(parser)
    add_engine_flags(parser)
    add_adapter_flag(parser)
    add_controller_flags(parser)
    add_sampling_flags(parser, temperature=1.0, max_new_tokens=512)


def run(arguments: argparse.Namespace) -> int:
    refuse_drafting(arguments)
    engine_name(arguments)
    refuse_adapters(filter(None, [arguments.adapter]), arguments.bundle, arguments.engine)
    bundle, fields = Bundle.read(arguments.bundle), given_fields(arguments)
    template_source(arguments, bundle)
    refuse_lacking(bundle, arguments, draft_length(arguments), batch=1)
    refuse_source(bundle, given=False)
    refuse_foreign_tokens(bundle, fields)
    params = sampling_params(arguments)
    with open_decoder(arguments, max_batch=1, prefix_bytes=KEPT_BYTES) as decoder:
        adapter = loaded_adapter(decoder, arguments.adapter)
        template, conversation = template_of(arguments, decoder), beginning(arguments)
        pictures: list[Picture] = []
        shown = 0  # of these, since the last line
        for line in _lines():
            if line.startswith(IMAGE):
                pictures += (found := _shown(line.removeprefix(IMAGE).strip(), decoder))
                shown += len(found)
                continue
            conversation.append(said_with_images(line, shown))
            shown = 0
            with _no_typing():
                output = _answer(
                    decoder, template.encode(conversation, pictures=pictures), pictures, params, arguments, adapter
                )
            conversation.append({"role": "assistant", "content": output.text})
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


def _shown(name: str, decoder: "Decoder") -> list[Picture]:
    """Read the image that a line names; where that cannot be done, say why."""
    try:
        if decoder.images is None:
            raise RequestError("the model reads text alone, and no images")
        return [decoder.images.read(read_image(Path(name)))]
    except RequestError as error:
        say(str(error))
        return []


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


def _answer(
    decoder: "Decoder",
    prompt: list[int],
    pictures: list[Picture],
    params: "SamplingParams",
    arguments: argparse.Namespace,
    adapter: str | None,
) -> Output:
    room = decoder.bundle.max_length - len(prompt) - more_tokens(pictures)
    if room < 1:
        raise RequestError(f"the conversation fills the model's {decoder.bundle.max_length} tokens; begin another")
    params = replace(params, max_new_tokens=min(params.max_new_tokens, room))
    asked = {"draft_length": draft_length(arguments), "drafter": arguments.drafter, "adapter": adapter}
    request = decoder.submit(prompt, params, images=pictures, **asked)
    ink = Ink(sys.stdout, decoder.tokenizer)
    while not request.finished:
        decoder.step()
        for piece in request.take():
            ink.write(piece)
    output = request.output()
    print(flush=True)
    say(f"{len(output.token_ids) / output.seconds:.1f} tokens/s; {summary(output.speculation)}")
    return output
