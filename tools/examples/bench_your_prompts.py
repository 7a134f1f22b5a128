"""Measure the draft lengths on prompts of your own, in turn, so that all of them meet the same machine.

python tools/examples/bench_your_prompts.py bundle [prompts.txt]
"""

import sys
from pathlib import Path
from statistics import median

from trt_spec.runtime import Decoder, SamplingParams, Speculation

PROMPTS = ["def read_config(", "class Stack:\n", "import os\n"]
DRAFT_LENGTHS = (0, 2, 4, 8)  # 0: without a draft
REPEATS = 3


def main(bundle: str, file: str = "") -> None:
    prompts = Path(file).read_text(encoding="utf-8").splitlines() if file else PROMPTS
    params = SamplingParams(max_new_tokens=64, ignore_eos=True)
    rates: dict[int, list[float]] = {length: [] for length in DRAFT_LENGTHS}
    texts, speculation = set[tuple[str, ...]](), {length: Speculation() for length in DRAFT_LENGTHS}
    with Decoder.open(bundle, max_batch=1) as decoder:
        for _ in range(1 + REPEATS):
            for length in DRAFT_LENGTHS:
                outputs = [decoder.generate(prompt, params, draft_length=length)[0] for prompt in prompts]
                tokens = sum(output.usage.completion_tokens for output in outputs)
                rates[length].append(tokens / sum(output.seconds for output in outputs))
                texts.add(tuple(output.text for output in outputs))
                for output in outputs:
                    speculation[length].add(output.speculation)
    print("  K  tokens/s  speed-up  tokens a round")
    speeds = {length: median(measured[1:]) for length, measured in rates.items()}  # the first warmed up
    for length, speed in speeds.items():
        a_round = speculation[length].tokens / speculation[length].rounds
        print(f"{length:3}  {speed:8.1f}  {speed / speeds[0]:7.2f}x  {a_round:14.2f}")
    print("the same texts at every K" if len(texts) == 1 else "DIFFERENT texts")


if __name__ == "__main__":
    main(*sys.argv[1:])
