"""Measure the figures that README quotes: speed against transformers, time over capacity, and memory.

The target is the demo target grown to 79 million parameters (see grow_pair), so texts and acceptance are real while the
cost is that of a larger model. Settings take turns; transformers runs in its own process.

    python -m trt_spec.tools.research.figures --work DIR [--json OUT]
"""

import argparse
import json
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ...export.pipeline import export_bundle
from ...runtime import Decoder, SamplingParams
from ..console import progress, say
from ..flags.sampling import add_number
from ..making.growing import LlamaSize, grow
from ..making.kept_bundles import DEMO_DRAFTS, TARGET
from ..measuring.bench import bench
from ..peers.against_transformers import PLAIN
from ..program import program
from ..timing.time_rounds import Measured, measure
from ..whole_file import outputs

GROWN = LlamaSize(hidden=768, layers=12, heads=12, kv_heads=4, mlp=2048)
CAPACITIES = (512, 8192)
COMPARED = {"model": ("1,2,3,4,6", "assisted"), "lookup": ("2,4,8,10", "prompt lookup")}  # K, and transformers' name


def prepare(work: Path) -> dict[str, Path]:
    """Make the grown checkpoint, and bundles of it at two capacities."""
    paths = {"target": work / "grown", "draft": work / "draft"}
    paths |= {str(capacity): work / f"bundle-{capacity}" for capacity in CAPACITIES}
    if not (paths["8192"] / "manifest.json").exists():
        grow(TARGET, paths["target"], GROWN)
        shutil.copytree(DEMO_DRAFTS["model"], paths["draft"], dirs_exist_ok=True)
        for role in ("target", "draft"):  # longer rotary positions need no training to be timed
            config = json.loads((paths[role] / "config.json").read_text())
            config["max_position_embeddings"] = max(CAPACITIES)
            (paths[role] / "config.json").write_text(json.dumps(config))
        for capacity in CAPACITIES:
            bundle = paths[str(capacity)]
            export_bundle(paths["target"], bundle, draft=paths["draft"], max_length=capacity, progress=say)
    return paths


def against_transformers(paths: dict[str, Path], repeats: int) -> dict[str, float]:
    """Tokens per second of this runtime and of transformers' generate, assisted generation and prompt lookup."""
    checkpoints = ("--target-checkpoint", paths["target"], "--draft-checkpoint", paths["draft"])
    rates = {}
    with Decoder.open(paths["8192"], max_batch=1) as decoder:
        for drafter, (lengths, their_name) in COMPARED.items():
            flags = ("--drafter", drafter, "--draft-lengths", lengths, "--max-new-tokens", 64, "--repeats", repeats)
            result = bench(decoder, *flags, "--compare", "hf", *checkpoints)
            for ours, theirs in zip(result["settings"], result["compared"]["settings"], strict=True):
                k = ours["draft_length"]
                names = (f"{drafter} K={k}", f"{their_name} K={k}") if k else ("plain", "generate")
                rates[names[0]] = ours["tokens_per_second"]
                rates[f"transformers {names[1]}"] = theirs["tokens_per_second"]
    return rates


def over_capacity(paths: dict[str, Path], repeats: int) -> dict[str, float]:
    """Milliseconds of a round without a draft at about 64 live tokens: unused capacity must cost nothing."""
    params = SamplingParams(max_new_tokens=32, ignore_eos=True)
    with (
        Decoder.open(paths["512"], max_batch=4) as small,
        Decoder.open(paths["8192"], max_batch=4) as large,
        progress("over capacity", total=1 + 3 * repeats) as show,
    ):
        measured = {(decoder, batch): Measured(PLAIN) for decoder in (small, large) for batch in (1, decoder.max_batch)}
        for turn in range(1 + 3 * repeats):
            show(f"repeat {turn} of {3 * repeats}" if turn else "warming up")
            for (decoder, batch), one in measured.items():
                prompts = [[7 + row] * 48 for row in range(batch)]
                measure(decoder, prompts, [params] * batch, one if turn else Measured(PLAIN))
        return {
            f"capacity {decoder.bundle.max_length} batch {batch}": median(one.round_ms)
            for (decoder, batch), one in measured.items()
        }


def memory(bundle: Path) -> dict[str, float]:
    """Resident megabytes of this process: after imports, with the models open, after 50 and 300 requests."""

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--work", type=Path, required=True, metavar="DIR", help="where the grown checkpoint and its bundles are kept"
    )
    add_number(parser, "--repeats", 3, "times each is measured")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file as well")


def run(arguments: argparse.Namespace) -> int:
    with outputs(arguments, "json") as out:
        paths = prepare(arguments.work)
        with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
            used: dict[str, Any] = fresh.submit(memory, paths["512"]).result()
        figures = {
            "memory_mb": used,
            "round_ms_over_capacity": over_capacity(paths, arguments.repeats),
            "tokens_per_second": against_transformers(paths, arguments.repeats),
        }
        for title, rows in figures.items():
            print(f"\n{title}")
            for name, value in rows.items():
                print(f"  {name:34} {value:10.3f}")
        print(json.dumps(figures))
        if out:
            print(json.dumps(figures), file=out["json"])
    return 0


main = program("figures", __doc__, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
