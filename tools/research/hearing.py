"""How fast a Whisper writes a sound down: alone, with its draft, and in transformers alone and with its assistant.

All take turns on the same window of sound, in one process, so that a slow moment slows all of them.

    python -m trt_spec.tools.research.hearing BUNDLE FILE.wav --target-checkpoint T --draft-checkpoint D
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from ...runtime import Decoder
from ...runtime.sources.log_mel import one_window, samples_of
from ...runtime.transcribing.transcriber import Transcriber
from ..console import table
from ..flags.sampling import positive
from ..program import program
from ..sound_files import read_sound

Run = Callable[[], list[int]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, help="of a Whisper with a draft that shares its encoder")
    parser.add_argument("file", type=Path, help="whose first window is heard")
    parser.add_argument("--target-checkpoint", type=Path, required=True)
    parser.add_argument("--draft-checkpoint", type=Path, required=True)
    parser.add_argument("--draft-length", type=positive, default=5, metavar="K")
    parser.add_argument("--repeat", type=positive, default=5, metavar="N")


def run(arguments: argparse.Namespace) -> int:
    with Decoder.open(arguments.bundle, max_batch=1) as decoder:
        runs, acceptance = _runs(decoder, arguments)
        found = measured(runs, arguments.repeat)
    said = [each["tokens"] for each in found.values()]
    assert all(tokens == said[0] for tokens in said), "all of them say the same"
    rows = [("", "seconds", "tokens a second", "beside K 0")]
    plain = next(iter(found.values()))["seconds"]
    for name, one in found.items():
        faster = median(own / theirs for own, theirs in zip(plain, one["seconds"], strict=True))
        rate = len(one["tokens"]) / median(one["seconds"])
        rows.append((name, f"{median(one['seconds']):.3f}", f"{rate:.1f}", f"{faster:.2f} ×"))
    print(table(rows))
    print(json.dumps({"acceptance": acceptance(), "seconds": {name: one["seconds"] for name, one in found.items()}}))
    return 0


def measured(runs: dict[str, Run], repeat: int) -> dict[str, dict[str, Any]]:
    """Run all in turn, once to warm up and then so many times."""
    found: dict[str, dict[str, Any]] = {name: {"tokens": one(), "seconds": []} for name, one in runs.items()}
    for _ in range(repeat):
        for name, one in runs.items():
            began = perf_counter()
            tokens = one()
            found[name]["seconds"].append(perf_counter() - began)
            assert tokens == found[name]["tokens"]
    return found


def _runs(decoder: Decoder, arguments: argparse.Namespace) -> tuple[dict[str, Run], Callable[[], float | None]]:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSpeechSeq2Seq

    encoder = decoder.bundle.encoder
    assert encoder is not None
    assert encoder.contract.sound is not None
    sound = encoder.contract.sound
    samples = read_sound(arguments.file)[: samples_of(sound)]
    transcriber = Transcriber(decoder)
    target = AutoModelForSpeechSeq2Seq.from_pretrained(arguments.target_checkpoint, dtype=torch.float32).eval()
    assistant = AutoModelForCausalLM.from_pretrained(arguments.draft_checkpoint, dtype=torch.float32).eval()
    picture, words = one_window(samples, sound)[None], transcriber.tokens.end
    asked = {"max_new_tokens": 440, "return_timestamps": True}

    def ours(draft_length: int) -> Run:
        def hear() -> list[int]:
            decoder.forget_outputs()  # and what the encoder has made
            heard = transcriber.transcribe(samples, draft_length=draft_length)
            return [token for one in heard.segments for token in one.token_ids if token < words]

        return hear

    def theirs(**more: Any) -> Run:
        def hear() -> list[int]:
            with torch.inference_mode():
                said = target.generate(input_features=picture, **asked, **more)[0].tolist()
            return [token for token in said if token < words]

        return hear

    drafted = f"K {arguments.draft_length}, the draft shares the encoder"
    runs = {
        "K 0": ours(0),
        drafted: ours(arguments.draft_length),
        "transformers": theirs(),
        "transformers, assisted": theirs(assistant_model=assistant),
    }
    return runs, lambda: decoder.speculation.acceptance


main = program("hearing", __doc__, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
