"""Print a completion while it is being written, then say how much of it the draft wrote.

python tools/examples/stream.py bundle
"""

import sys

from trt_spec.runtime import Decoder, SamplingParams


def main(bundle: str, prompt: str = "def read_config(") -> None:
    with Decoder.open(bundle, max_batch=1) as decoder:
        print(prompt, end="")
        from_draft: list[bool] = []
        for piece in decoder.stream(prompt, SamplingParams(max_new_tokens=64, temperature=0.8, seed=7)):
            print(piece.text, end="", flush=True)
            from_draft += piece.from_draft
        print(f"\n\n{sum(from_draft)} of {len(from_draft)} tokens were proposed by the draft and accepted")


if __name__ == "__main__":
    main(*sys.argv[1:])
