"""Complete a prompt. The text is that of the bundle's target; the draft only makes it come sooner."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...engines import Bundle, RequestError
from ...runtime import BeamText, Output
from ...runtime.requests.bounds import refuse_foreign_tokens, refuse_images, refuse_long, refuse_source
from ..flags.adapters import add_adapter_flag, loaded_adapter, refuse_adapters
from ..flags.controller import add_controller_flags, draft_length, refuse_drafting, refuse_lacking
from ..flags.engine import add_engine_flags, engine_name, open_decoder
from ..flags.images import add_image_flag, read_image, said_with_images
from ..flags.prompt import add_prompt_flags, add_source_flags, chosen_prompt, chosen_source, refuse_prompt
from ..flags.sampling import add_sampling_flags, given_fields, sampling_params
from ..flags.templates import add_template_flags, beginning, template_of, template_source
from ..in_words import lossy, summary
from ..output_json import output_json
from ..pages.trace_page import trace_page
from ..trace_lines import Marks
from ..whole_file import outputs, refuse_unfit

if TYPE_CHECKING:
    from ...runtime import Decoder, Request
    from ...runtime.images.picture import Picture


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bundle", required=True, metavar="B", type=Path, help="the folder that export-models wrote")
    add_prompt_flags(parser)
    add_source_flags(parser)
    add_image_flag(parser)
    parser.add_argument("--chat", action="store_true", help="ask a chat model: write the prompt as a user's message")
    add_template_flags(parser)
    add_engine_flags(parser)
    add_controller_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--stream", action="store_true", help="print the text as it comes")
    parser.add_argument(
        "--trace-html",
        type=Path,
        metavar="OUT",
        help="write an HTML page that shows which model wrote which token, and why",
    )
    parser.add_argument("--trace", action="store_true", help="print a line about each round, then the text")
    add_sampling_flags(parser)
    add_adapter_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.stream and (arguments.json or arguments.trace):
        raise RequestError("--stream prints text as it comes, --json and --trace something else; choose one")
    if not arguments.chat and (arguments.system or arguments.chat_template):
        raise RequestError("--system and --chat-template say how messages are written, but --chat is missing; add it")
    refuse_drafting(arguments)
    engine_name(arguments)
    refuse_unfit(arguments.trace_html)
    refuse_adapters(filter(None, [arguments.adapter]), arguments.bundle, arguments.engine)
    source = chosen_source(arguments)
    prompt = chosen_prompt(arguments, needed=source is None)
    images = list(map(read_image, arguments.image))
    _refuse_in_bundle(arguments, prompt, source)
    params = sampling_params(arguments)
    with outputs(arguments, "trace_html") as out, open_decoder(arguments, max_batch=1) as decoder:
        pictures = [] if decoder.images is None else list(map(decoder.images.read, images))
        request = decoder.submit(
            _as_asked(prompt, pictures, arguments, decoder),
            params,
            draft_length=draft_length(arguments),
            drafter=arguments.drafter,
            trace=arguments.trace or bool(out),
            source=source,
            adapter=loaded_adapter(decoder, arguments.adapter),
            images=pictures,
        )
        if arguments.trace and not arguments.json:
            _print_rounds(decoder, request)
        while not request.finished:
            decoder.step()
            if arguments.stream:
                print("".join(piece.text for piece in request.take()), end="", flush=True)
        if out:
            out["trace_html"].write(trace_page(prompt, request, decoder))
        _print_result(request.output(), arguments)
    if params.lenient:
        print(lossy(params.lenience), file=sys.stderr)
    return 0


def _refuse_in_bundle(arguments: argparse.Namespace, prompt: str, source: str | None) -> None:
    """Refuse what the bundle's manifest rules out, before the bundle is opened."""
    bundle, fields = Bundle.read(arguments.bundle), given_fields(arguments)
    if arguments.chat:
        template_source(arguments, bundle)
    refuse_lacking(bundle, arguments, draft_length(arguments), batch=1)
    refuse_source(bundle, source is not None)
    refuse_long(bundle, fields.max_new_tokens)
    refuse_foreign_tokens(bundle, fields)
    if arguments.image:
        refuse_images(bundle)
    if source is None and not arguments.chat:
        refuse_prompt(bundle, prompt, fields)


def _as_asked(
    prompt: str, pictures: "list[Picture]", arguments: argparse.Namespace, decoder: "Decoder"
) -> str | list[int]:
    if arguments.chat:
        asked = said_with_images(prompt, len(pictures))
        return template_of(arguments, decoder).encode([*beginning(arguments), asked], pictures=pictures)
    return prompt


def _print_rounds(decoder: "Decoder", request: "Request") -> None:
    marks = Marks.suited_to(sys.stdout)
    print(marks.legend())
    printed = 0
    while not request.finished:
        decoder.step()
        for traced in (request.trace or [])[printed:]:
            printed += 1
            print(marks.line(printed, traced, decoder.tokenizer), flush=True)


def _print_result(output: Output, arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(json.dumps(output_json(output)))
    elif arguments.stream:
        print()
    else:
        if arguments.trace:
            print(f"{summary(output.speculation)}\n")
        print(in_turn(output.beams) if len(output.beams) > 1 else output.text)


def in_turn(beams: Sequence[BeamText]) -> str:
    """Show the texts of a search one after another, each under its score."""
    return "\n\n".join(f"{place}. score {beam.score:.4f}\n{beam.text}" for place, beam in enumerate(beams, 1))
