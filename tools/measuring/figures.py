"""Measure the figures that README quotes: speed against transformers, time over capacity, and memory.

The target is the demo target grown to 79 million parameters (see grow_pair), so texts and acceptance are real while the
cost is that of a larger model. Every comparison interleaves its settings; transformers runs in its own process.

    python -m trt_spec.tools.measuring.figures --work DIR [--json OUT]
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from ...export.pipeline import export_bundle
from ...runtime import Decoder, SamplingParams
from ..console import progress, say
from ..flags.sampling import positive
from ..making.grow_pair import LlamaSize, grow
from ..program import Parser, exit_code
from ..whole_file import whole_file
from .against_transformers import PLAIN, Transformers
from .apart import Apart
from .theirs import Theirs
from .time_rounds import Setting

PAIR = Path(__file__).parents[1] / "demo_pair"
GROWN = LlamaSize(hidden=768, layers=12, heads=12, kv_heads=4, mlp=2048)
PROMPTS = [
    "def read_config(path):\n    ",
    "class Stack:\n    def __init__(self",
    "import os\nimport sys\n\ndef main():\n",
    "    for name, value in items.items():\n        ",
]
NEW_TOKENS = 64


def median_seconds(title: str, settings: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Run the settings in turn, `repeats` times after a warm-up, and return the median of each."""
    seconds: dict[str, list[float]] = {name: [] for name in settings}
    with progress(title, total=(1 + repeats) * len(settings)) as show:
        for turn in range(1 + repeats):
            stage = f"repeat {turn} of {repeats}" if turn else "warming up"
            for name, run in settings.items():
                show(f"{stage}, {name}")
                began = perf_counter()
                run()
                if turn:
                    seconds[name].append(perf_counter() - began)
    return {name: statistics.median(times) for name, times in seconds.items()}


def prepare(work: Path) -> dict[str, Path]:
    """Make the grown checkpoint, and bundles of it at two capacities."""
    grown, draft = work / "grown", work / "draft"
    if not (work / "bundle-8192" / "manifest.json").exists():
        grow(PAIR / "pycode-14m", grown, GROWN)
        shutil.copytree(PAIR / "pycode-1m", draft, dirs_exist_ok=True)
        for checkpoint in (grown, draft):  # longer rotary positions need no training to be timed
            config = json.loads((checkpoint / "config.json").read_text())
            (checkpoint / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
        for capacity in (512, 8192):
            export_bundle(grown, work / f"bundle-{capacity}", draft=draft, max_length=capacity, progress=say)
    return {"grown": grown, "draft": draft, "512": work / "bundle-512", "8192": work / "bundle-8192"}


def against_transformers(paths: dict[str, Path], repeats: int) -> dict[str, float]:
    """Tokens per second of this runtime and of transformers' generate, assisted generation and prompt lookup."""
    settings: dict[str, Callable[[], Any]] = {}
    with (
        Apart("transformers", Transformers, paths["grown"], paths["draft"]) as other,
        Decoder.open(paths["8192"]) as decoder,
    ):
        prompts = [decoder.tokenizer.encode(prompt).ids for prompt in PROMPTS]
        params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)

        def ours(setting: Setting) -> None:
            for prompt in prompts:
                decoder.generate(prompt, params, draft_length=setting.draft_length, drafter=setting.drafter)

        def theirs(setting: Setting) -> None:
            other.measure(prompts, [params] * len(prompts), Theirs(setting))

        for name, their_name, setting in (
            ("plain", "generate", PLAIN),
            *((f"model K={k}", f"assisted K={k}", Setting(k, "model")) for k in (1, 2, 3, 4, 6)),
            *((f"lookup K={k}", f"prompt lookup K={k}", Setting(k, "lookup")) for k in (2, 4, 8, 10)),
        ):
            settings[name] = partial(ours, setting)
            settings[f"transformers {their_name}"] = partial(theirs, setting)
        seconds = median_seconds("against transformers", settings, repeats)
    return {name: len(PROMPTS) * NEW_TOKENS / taken for name, taken in seconds.items()}


def over_capacity(paths: dict[str, Path], repeats: int) -> dict[str, float]:
    """Seconds of decoding at about 64 live tokens, by capacity and batch: unused capacity must cost nothing."""
    params = SamplingParams(max_new_tokens=32, ignore_eos=True)
    settings: dict[str, Callable[[], Any]] = {}
    with Decoder.open(paths["512"]) as small, Decoder.open(paths["8192"]) as large:
        for capacity, decoder in (("512", small), ("8192", large)):
            for batch in (1, 4):
                prompts = [[7 + row] * 48 for row in range(batch)]
                settings[f"capacity {capacity} batch {batch}"] = lambda d=decoder, p=prompts: d.generate(p, params)  # type: ignore[misc]
        return median_seconds("over capacity", settings, 3 * repeats)


def memory(bundle: Path) -> dict[str, float]:
    """Resident megabytes of a fresh process: after imports, with the models open, after 50 and 300 requests."""
    done = subprocess.run(
        [sys.executable, "-m", "trt_spec.tools.measuring.figures", "--memory-of", str(bundle)],
        capture_output=True,
        text=True,
        check=True,
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure_memory(bundle: Path) -> dict[str, float]:
    def resident() -> float:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * 4096 / 1e6

    import onnxruntime  # noqa: F401  the baseline is a process with its imports done

    torch.set_num_threads(1)
    found = {"imported": resident()}
    with Decoder.open(bundle) as decoder:
        found["open"] = resident()
        found["weights"] = sum(decoder.bundle.weight_bytes(role) for role in ("target", "draft")) / 1e6
        for request in range(1, 301):
            length = 8 + 37 * request % 200
            params = SamplingParams(max_new_tokens=8, temperature=float(request % 2), seed=request)
            decoder.generate([[request % 4000 + 5] * length], params)
            if request in (50, 300):
                found[f"after {request} requests"] = resident()
        models = [model for model in (decoder.target, decoder.draft) if model is not None]
        found["cache"] = sum(b.nbytes for model in models for b in model.cache.buffers.values()) / 1e6
    return found


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code("figures", partial(run, argv))


def run(argv: Sequence[str] | None) -> int:
    parser = Parser(prog="figures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, metavar="DIR", help="where the grown checkpoint and its bundles are kept")
    parser.add_argument("--repeats", type=positive, default=3, metavar="N", help="times each is measured (default 3)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file as well")
    parser.add_argument("--memory-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.read(argv)
    if arguments.memory_of:
        print(json.dumps(measure_memory(arguments.memory_of)))
        return 0
    if not arguments.work:
        parser.error("--work is required")
    paths = prepare(arguments.work)
    figures = {
        "memory_mb": memory(paths["512"]),
        "seconds_over_capacity": over_capacity(paths, arguments.repeats),
        "tokens_per_second": against_transformers(paths, arguments.repeats),
    }
    for title, rows in figures.items():
        print(f"\n{title}")
        for name, value in rows.items():
            print(f"  {name:34} {value:10.3f}")
    print(json.dumps(figures))
    if arguments.json:
        with whole_file(arguments.json) as out:
            print(json.dumps(figures), file=out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
