"""Records the texts of every drafter, rule and shape, so that a change that must change none can be compared.

    python -m tests.kit.recording record BUNDLE FILE      before
    python -m tests.kit.recording compare BUNDLE FILE     after: lists what differs, by what it was made with

Where proposals are no single line, the rules that draw may key their uniforms in another way: such texts are counted
apart. Costs are made up, so that auto chooses alike wherever it runs.
"""

import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from unittest.mock import patch

from trt_spec.engines import Bundle
from trt_spec.runtime import Decoder, EntropyRule, RequestError, SamplingParams
from trt_spec.runtime.lengths.costs import Costs

RULES = {
    "greedy": SamplingParams(),
    "greedy, penalties": SamplingParams(repetition_penalty=1.3, frequency_penalty=0.3),
    "coupled": SamplingParams(temperature=0.9, rule="coupled", seed=3),
    "rejection": SamplingParams(temperature=0.9, top_p=0.95, seed=4),
    "tokenwise": SamplingParams(temperature=1.0, rule="tokenwise", top_k=20, min_p=0.01, seed=5),
    "lenient": SamplingParams(temperature=0.8, lenience=0.5, seed=6),
}
LENGTHS = (0, 1, 4, "3+2", "2+6", "3/6", "5/20", "2x2", "3x2x1", EntropyRule(1, 5, 0.5, 0.9), "auto")
DRAFTERS = (
    "none", "model", "lookup", "suffix", "ngram", "random", "cascade", "mixed",
    "model+lookup", "model+suffix", "suffix+suffix", "lookup+lookup", "random+ngram+model",
)  # fmt: skip
ENGINES = ("onnxruntime", "openvino")
TOKENS = 16


def prompt_sets(vocab_size: int, longest: int) -> dict[str, list[list[int]]]:
    """Return sets of four prompts: short, long, repetitive, of one token, and all kinds together."""
    dice = random.Random(7)
    short = [[dice.randrange(2, vocab_size) for _ in range(length)] for length in (3, 7, 2, 12)]
    long = [[dice.randrange(2, vocab_size) for _ in range(length)] for length in (60, 90, longest, 33)]
    repetitive = [(each * 20)[:40] for each in short]
    single = [[dice.randrange(2, vocab_size)] for _ in range(4)]
    mixed = [short[0], long[2], repetitive[1], single[0]]
    return {"short": short, "long": long, "repetitive": repetitive, "single": single, "mixed": mixed}


def costs_of(bundle: Bundle, engine: str) -> Costs:
    names = ["model", "lookup", "suffix", "ngram", "random", "cascade"]
    rounds = tuple(tuple(10.0 + 0.4 * k * batch**0.5 for k in (0, 1, 2, 4, 8)) for batch in (1, 4))
    beside = (1, 4, "4/8") if engine == "onnxruntime" else ()
    return Costs(
        engine, "cpu", "none", {}, (1, 4), (0, 1, 2, 4, 8), dict.fromkeys(names, rounds),
        dict.fromkeys(names, 0.6), dict.fromkeys(names, 0.8), beside,
        {"model": tuple(tuple(0.2 * (i + 1) for i in range(len(beside))) for _ in (1, 4))} if beside else {},
        {"model": tuple(0.5 for _ in beside)} if beside else {},
    )  # fmt: skip


def texts(path: Path) -> Iterator[tuple[str, list[list[int]]]]:
    """Yield the name and the tokens of each combination that a decoder takes."""
    bundle = Bundle.open(path)
    sets = prompt_sets(bundle.tokenizer.vocab_size, min(300, bundle.max_length - 40))
    for engine, batch in product(ENGINES, (1, 4)):
        costs = costs_of(bundle, engine)
        with (
            patch("trt_spec.runtime.decoder.read_costs", lambda *_, costs=costs: costs),
            Decoder.open(bundle, engine, max_batch=batch) as decoder,
        ):
            asked_for = product(RULES.items(), LENGTHS, DRAFTERS)
            for number, ((rule, params), length, drafter) in enumerate(asked_for):
                named = list(sets)[number * batch % len(sets)]  # each combination meets another
                prompts = sets[named]
                asked = [
                    SamplingParams(**{**vars(params), "max_new_tokens": TOKENS + 2 * i, "ignore_eos": True})
                    for i in range(len(prompts))
                ]
                decoder.forget_outputs()
                try:
                    outputs = decoder.generate(prompts, asked, draft_length=length, drafter=drafter)
                except RequestError:
                    continue
                name = f"{engine} | batch {batch} | {rule} | {length} | {drafter} | {named}"
                yield name, [list(output.token_ids) for output in outputs]


def kind(name: str) -> str:
    """Say whether a text must stay as it is."""
    _, _, rule, length, drafter, _ = name.split(" | ")
    decides = not rule.startswith(("greedy", "coupled"))
    several = "+" in drafter or any(mark in length for mark in "+/x") or length == "auto"
    return "uniforms of trees" if decides and several and "Entropy" not in length else "the same"


def main() -> None:
    command, bundle, file = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    if command == "record":
        file.write_text(json.dumps(dict(texts(bundle))))
        return
    before, counts = json.loads(file.read_text()), Counter()
    for name, tokens in texts(bundle):
        same = before.pop(name, None) == tokens
        counts[kind(name), same] += 1
        if not same:
            print("differs:", name, flush=True)
    print(*(f"missing: {name}" for name in before), sep="\n")
    print(*(f"{what}: {number} {'equal' if same else 'differ'}" for (what, same), number in counts.items()), sep="\n")
    sys.exit(any(what == "the same" and not same for what, same in counts) or bool(before))


if __name__ == "__main__":
    main()
