"""How fast a search with beams is: without proposals, with those of the draft, and in transformers.

All take turns on the same prompts, in one process, so that a slow moment slows all of them. All find the same texts.

    python -m trt_spec.tools.research.searching BUNDLE --checkpoint TARGET --num-beams 4 --draft-lengths 0,2,4
"""

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

from ...runtime import Decoder, Output, SamplingParams
from ..console import table
from ..flags.sampling import add_number, positive
from ..program import program
from ..prompts.shipped import PYTHON_PROMPTS
from .hearing import Run, measured


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, help="of a target with a draft")
    parser.add_argument("--checkpoint", type=Path, help="the target's, for transformers' own search")
    add_number(parser, "--num-beams", 4, "beams of each search")
    parser.add_argument(
        "--draft-lengths", default="0,2,4", metavar="K,…", help="the first is what others are compared to"
    )
    add_number(parser, "--prompts", 4, "of the shipped prompts in Python")
    add_number(parser, "--max-new-tokens", 48, "tokens of each text")
    parser.add_argument("--repeat", type=positive, default=3, metavar="N")


def run(arguments: argparse.Namespace) -> int:
    outputs: dict[str, list[Output]] = {}
    with Decoder.open(arguments.bundle, max_batch=1) as decoder:
        found = measured(_runs(decoder, arguments, outputs), arguments.repeat)
    said = [each["tokens"] for each in found.values()]
    assert all(tokens == said[0] for tokens in said), "all of them find the same texts"
    first = next(iter(found.values()))["seconds"]
    rows = [("", "seconds", "tokens a second", "passes of the target", "tokens a pass", "beside the first")]
    for name, one in found.items():
        faster = median(own / theirs for own, theirs in zip(first, one["seconds"], strict=True))
        passes = sum(output.speculation.rounds for output in outputs.get(name, ()))
        seconds = median(one["seconds"])
        each = f"{len(one['tokens']) / passes:.2f}" if passes else ""
        counted = (f"{seconds:.3f}", f"{len(one['tokens']) / seconds:.1f}", str(passes or ""), each)
        rows.append((name, *counted, f"{faster:.2f} ×"))
    print(table(rows))
    return 0


def _runs(decoder: Decoder, arguments: argparse.Namespace, outputs: dict[str, list[Output]]) -> dict[str, Run]:
    prompts = [decoder.tokenizer.encode(text).ids for text in PYTHON_PROMPTS[: arguments.prompts]]
    asked = {"num_beams": arguments.num_beams, "max_new_tokens": arguments.max_new_tokens}
    params = SamplingParams(ignore_eos=True, **asked)

    def ours(length: str) -> Run:
        draft_length = int(length) if length.isdecimal() else length

        def search() -> list[int]:
            decoder.forget_outputs()
            found = decoder.generate(prompts, params, draft_length=draft_length)
            outputs[f"K {length}"] = found
            return [token for output in found for token in output.token_ids]

        return search

    runs = {f"K {length}": ours(length) for length in arguments.draft_lengths.split(",")}
    return runs | ({"transformers": _theirs(arguments.checkpoint, prompts, asked)} if arguments.checkpoint else {})


def _theirs(checkpoint: Path, prompts: list[list[int]], asked: dict[str, Any]) -> Run:
    import torch
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def search() -> list[int]:
        said = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            given = {
                "attention_mask": torch.ones_like(ids),
                "eos_token_id": None,
                "pad_token_id": 0,
                "do_sample": False,
            }
            with torch.inference_mode():
                said += target.generate(ids, **given, **asked)[0, len(prompt) :].tolist()
        return said

    return search


main = program("searching", __doc__, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
