"""Complete a prompt with a bundle."""

import argparse
import json
import sys
from pathlib import Path

from ..engines import RequestError
from ..runtime import Decoder, Output, Request
from ..runtime.decoder import DEFAULT_DRAFT_LENGTH
from ..runtime.drafters import DRAFTERS
from ..runtime.request import AUTO, MIXED
from .engine_flags import add_engine_flags, open_decoder
from .prompts import add_prompt_flags, chosen_prompt
from .report import lossy, output_json, summary
from .sampling_flags import add_sampling_flags, sampling_params
from .trace import Marks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bundle", required=True, metavar="B", type=Path, help="made by export-models")
    add_prompt_flags(parser)
    add_engine_flags(parser)
    parser.add_argument(
        "--draft-length",
        type=draft_length,
        metavar="K|auto",
        help="proposals a round, 0 decodes plainly, auto chooses for each round (default auto once trt-spec tune has "
        f"measured what rounds cost here, else {DEFAULT_DRAFT_LENGTH} or what plans were compiled for)",
    )
    parser.add_argument(
        "--drafter",
        metavar="|".join((*DRAFTERS, MIXED)),
        help="where proposals come from (default: the draft model if any); mixed chooses for each round",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--stream", action="store_true", help="print text as it comes")
    parser.add_argument("--trace", action="store_true", help="print each round on a line, then the text")
    add_sampling_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.stream and (arguments.json or arguments.trace):
        raise RequestError("--stream prints text as it comes, --json and --trace something else; choose one")
    params = sampling_params(arguments)
    prompt = chosen_prompt(arguments)
    with open_decoder(arguments, max_batch=1) as decoder:
        request = decoder.submit(
            prompt, params, draft_length=arguments.draft_length, drafter=arguments.drafter, trace=arguments.trace
        )
        if arguments.trace and not arguments.json:
            _print_rounds(decoder, request)
        while not request.finished:
            decoder.step()
            if arguments.stream:
                print("".join(piece.text for piece in request.take()), end="", flush=True)
        _print_result(request.output(), arguments)
    if params.lenient:
        print(lossy(params.lenience), file=sys.stderr)
    return 0


def draft_length(text: str) -> int | str:
    if text == AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}, expected auto or a whole number") from None


def _print_rounds(decoder: Decoder, request: Request) -> None:
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
        print(output.text)
