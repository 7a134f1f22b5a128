"""Complete a prompt with the shipped pair of models, with and without the draft: the same text, sooner.

The first run exports the pair, which takes a minute or two. The exit code is 1 if the texts differ.
"""

import argparse
import json
import sys
from statistics import median
from typing import TYPE_CHECKING, Any

from ...engines import MAX_DRAFT_LENGTH, RequestError
from ...runtime import Output
from ...runtime.state.asked import DEFAULT_DRAFT_LENGTH
from ..console import say
from ..flags.sampling import add_number, sampling_params
from ..in_words import summary
from ..ink import GREEN, Ink
from ..making.kept_bundles import DEMO_DRAFTS, demo_bundle, refuse_unshipped
from ..output_json import output_json
from ..prompts.shipped import PYTHON_PROMPTS
from ..trace_lines import RESET

if TYPE_CHECKING:
    from ...runtime import Decoder, SamplingParams

PROMPT = PYTHON_PROMPTS[4]  # whose speed-up is about that of all that bench measures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        default=PROMPT,
        help="the beginning of some Python source, which is all the shipped pair knows",
    )
    add_number(parser, "--max-new-tokens", 128, "tokens to write")
    parser.add_argument("--temperature", type=float, default=0.7, metavar="X", help="0 is greedy (default 0.7)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="another one gives another text (default 1)")
    parser.add_argument(
        "--drafter", choices=DEMO_DRAFTS, default="model", help="a model of its own, or a head (default model)"
    )
    add_number(parser, "--draft-length", DEFAULT_DRAFT_LENGTH, "tokens to propose in each round", letter="K")
    add_number(parser, "--repeats", 3, "timed runs with and without the draft")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    refuse_unshipped(arguments.drafter)
    if (length := arguments.draft_length) > MAX_DRAFT_LENGTH:
        raise RequestError(f"--draft-length is {length}, expected a whole number from 1 to {MAX_DRAFT_LENGTH}")
    # The rule gives one text for a seed, with and without the draft.
    params = sampling_params(arguments, ignore_eos=True, rule="coupled")
    from ...runtime import Decoder

    bundle = demo_bundle(say, arguments.drafter)
    with Decoder.open(bundle, max_batch=1) as decoder:
        plain: list[Output] = []
        drafted: list[Output] = []
        for _ in range(1 + arguments.repeats):  # the first warms up
            plain += decoder.generate(arguments.prompt, params, drafter="none")
            drafted += decoder.generate(arguments.prompt, params, draft_length=arguments.draft_length)
        identical = len({output.token_ids for output in (*plain, *drafted)}) == 1
        if identical and not arguments.json:
            _show(decoder, arguments.prompt, params, arguments.draft_length)
    result = {
        "prompt": arguments.prompt,
        "draft_length": arguments.draft_length,
        "repeats": arguments.repeats,
        "identical": identical,
        "plain": _side(plain),
        "speculative": _side(drafted),
    }
    result["speed_up"] = result["speculative"]["tokens_per_second"] / result["plain"]["tokens_per_second"]
    print(json.dumps(result) if arguments.json else _report(result, plain[-1], drafted[-1]))
    return 0 if identical else 1


def _show(decoder: "Decoder", prompt: str, params: "SamplingParams", draft_length: int) -> None:
    ink = Ink(sys.stdout, decoder.tokenizer, GREEN)
    print(prompt, end="")
    for piece in decoder.stream(prompt, params, draft_length=draft_length):
        ink.write(piece)
    print("\n")
    if ink.coloured:
        print(f"{GREEN}Green{RESET} is what the draft proposed and the target accepted.")


def _side(outputs: list[Output]) -> dict[str, Any]:
    """The last output as JSON, with the median speed of all but the first, which warmed up."""
    rates = [len(output.token_ids) / output.seconds for output in outputs[1:]]
    return output_json(outputs[-1]) | {"tokens_per_second": median(rates)}


def _report(result: dict[str, Any], plain: Output, drafted: Output) -> str:
    if result["identical"]:
        texts = [f"With and without the draft: the same {len(plain.token_ids)} tokens, one by one."]
    else:
        texts = ["Without the draft:", plain.text, "", "With the draft, and DIFFERENT:", drafted.text]
    return "\n".join(
        [
            *texts,
            "",
            f"target alone      {result['plain']['tokens_per_second']:7.1f} tokens/s",
            f"target and draft  {result['speculative']['tokens_per_second']:7.1f} tokens/s, "
            f"{result['speed_up']:.2f} × as fast",
            f"{summary(drafted.speculation)}, K = {result['draft_length']}",
        ]
    )
