"""Measure on a GPU, in one run: parity with transformers, speed by size, and whether TensorRT runs.

    python -m trt_spec.tools.measuring.gpu_report --work DIR [--device cuda] [--shapes 0.1B 3B 8B] [--json OUT]

Parity is measured on the demo pair, in each engine and dtype. Speed is measured on pairs grown from it (see grow_pair),
so texts and acceptance are real: tokens per second by K or tree, batch, temperature and mode (eager, captured,
compiled), the parts of a round by the GPU's own clock, and plain decoding as a share of what the memory allows. Each
shape is grown and exported once, into DIR. The output is a table of each and, on the last line, one JSON object.
"""

import argparse
import gc
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from ...engines import Bundle, RequestError, TrtSpecError, open_engine
from ...engines.errors import first_line
from ...export.pipeline import export_bundle
from ...export.quality import checkpoint_logits, engine_logits
from ...runtime import Decoder, SamplingParams
from ...runtime.state.asked import DraftLength
from ..certificate.probe import Probe
from ..certificate.same_text import ask_plain, in_another_engine
from ..certificate.subject import Subject
from ..commands.bench import bench
from ..console import say, table_of
from ..flags.sampling import add_number
from ..making.grow_pair import grow
from ..making.growing import LlamaSize
from ..making.kept_bundles import DEMO_DRAFTS, TARGET
from ..making.training import refuse_device
from ..program import program
from .against_transformers import PLAIN, Transformers
from .bandwidth import read_bandwidth
from .shipped_prompts import PYTHON_PROMPTS
from .theirs import Theirs
from .time_rounds import Setting

DTYPES = ("float32", "float16", "bfloat16")
BATCHES = (1, 4, 16)
DRAFT_LENGTHS = (0, 2, 4, 6, 8)
TREES = ("5+3", "6/8", "6/24")
TEMPERATURES = (0.0, 1.0)
REPEATS = 2
RTX_SHAPES: tuple[DraftLength, ...] = (4, "4/8")
SHAPES = {  # of target and draft; None is the demo draft itself
    "0.1B": (LlamaSize(768, 12, 12, 4, 2048), None),
    "3B": (
        LlamaSize(3072, 28, 48, 16, 8192),
        LlamaSize(2048, 16, 32, 8, 8192),
    ),  # of Llama 3.2's 3B and 1B, heads of 64
    "8B": (LlamaSize(4096, 32, 64, 16, 14336), None),
}
MODES = {"eager": ("torch", False), "captured": ("torch", True), "compiled": ("torch-compiled", True)}
MAX_LENGTH = 1024


def parity(work: Path, device: str, engine: str, new_tokens: int) -> list[dict[str, Any]]:
    """Compare logits with the checkpoint's, and greedy text with that of ONNX Runtime on the CPU, in all dtypes."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    tokens: list[int] = Tokenizer.from_file(str(TARGET / "tokenizer.json")).encode("".join(PYTHON_PROMPTS)).ids
    expected = checkpoint_logits(model, tokens)
    params = SamplingParams(max_new_tokens=new_tokens, temperature=0)
    reference = texts(exported(work / "demo-float32", TARGET, DEMO_DRAFTS["model"], "float32"), params)
    rows = []
    for dtype in DTYPES:
        bundle = exported(work / f"demo-{dtype}", TARGET, DEMO_DRAFTS["model"], dtype)
        if engine == "onnxruntime" and device == "cpu" and dtype != "float32":
            continue  # it has no kernels for them
        found = engine_logits_of(bundle, engine, device, tokens)
        same = sum(a == b for a, b in zip(texts(bundle, params, engine, device), reference, strict=True))
        error = float((found - expected).norm() / expected.norm())
        row = {"engine": engine, "dtype": dtype, "logit_error": error}
        rows.append(row | {"same_text": f"{same} of {len(reference)}"})
    return rows


def coupled_ties(work: Path, device: str, engine: str, new_tokens: int) -> dict[str, Any]:
    """Compare the coupled rule on the device with plain decoding on the CPU; the arbiter judges each difference."""
    here = Subject(Bundle.open(work / "demo-float32"), "onnxruntime", "cpu", batch=4)
    params = SamplingParams(max_new_tokens=new_tokens, temperature=1.0, rule="coupled", seed=11)
    asked = ask_plain(here, [(prompt, params) for prompt in here.prompts()])
    probe = Probe(here)
    try:
        return asdict(in_another_engine(replace(here, engine=engine, device=device), asked, probe))
    finally:
        probe.close()


def exported(path: Path, target: Path, draft: Path, dtype: str) -> Path:
    if not (path / "manifest.json").exists():
        export_bundle(target, path, draft, max_length=MAX_LENGTH, dtype=dtype, check=False, progress=say)
    return path


def engine_logits_of(path: Path, engine: str, device: str, tokens: list[int]) -> Tensor:
    bundle = Bundle.open(path)
    opened = open_engine(engine, bundle.graph("target"), bundle.target.contract, device)
    try:
        return engine_logits(opened, tokens).cpu().float()
    finally:
        opened.close()


def texts(
    bundle: Path,
    params: SamplingParams,
    engine: str = "onnxruntime",
    device: str = "cpu",
    draft_length: DraftLength = 4,
) -> list[tuple[int, ...]]:
    with Decoder.open(bundle, engine, device, max_batch=4) as decoder:
        outputs = decoder.generate(list(PYTHON_PROMPTS), params, draft_length=draft_length)
    return [output.token_ids for output in outputs]


def speeds(pair: str, bundle: Path, device: str, mode: str, new_tokens: int) -> list[dict[str, Any]]:
    """Measure all settings of a mode, those of a batch and temperature in turn."""
    engine, capture = MODES[mode]
    lengths = ",".join(map(str, (*DRAFT_LENGTHS, *TREES)))
    flags = ("--draft-lengths", lengths, "--max-new-tokens", new_tokens, "--repeats", REPEATS)
    found = []
    for batch in BATCHES:
        with Decoder.open(bundle, engine, device, batch, capture=capture) as decoder:
            for temperature in TEMPERATURES:
                result = bench(decoder, *flags, "--temperature", temperature)
                of = {"pair": pair, "mode": mode, "batch": batch, "temperature": temperature}
                for one in (*result["settings"], *result["shapes"]):
                    found.append(of | speed_of(one, result["roof"]["roof_ms"]))
    return found


def speed_of(one: dict[str, Any], roof_ms: float) -> dict[str, Any]:
    """Return a row of the table; the milliseconds of a round's parts are by the device's own clock."""
    k, parts = one["draft_length"], {part: one["parts_ms"][part] for part in ("draft", "verify", "accept")}
    return {
        "draft_length": one.get("shape", k),
        "tokens_per_second": one["tokens_per_second"],
        "round_ms": one["round_ms"],
        **{f"{part}_ms": ms for part, ms in parts.items()},
        "over_kernels": one["round_ms"] / sum(parts.values()),  # what gaps and the host add
        "roof_share": None if k else roof_ms / one["round_ms"],  # of plain decoding: the time to read the weights
        "speed_up": one["speed_up"],
        "of_theory": one["speed_up"] / one["predicted"] if k and one["predicted"] else None,
    }


def transformers_speeds(target: Path, draft: Path, dtype: str, device: str, new_tokens: int) -> dict[str, float]:
    """Tokens per second of transformers' generate, and of its assisted generation with K = 4, greedy, batch 1."""
    other = Transformers(target, draft, dtype, device)
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    prompts = [tokenizer.encode(prompt).ids for prompt in PYTHON_PROMPTS]
    params = [SamplingParams(max_new_tokens=new_tokens)] * len(prompts)
    rates = {"generate": Theirs(PLAIN), "assisted": Theirs(Setting(4, "model"))}
    for _ in range(3):
        for one in rates.values():
            other.measure(prompts, params, one)
    return {name: max(one.tokens_per_second) for name, one in rates.items()}


def try_rtx(bundle: Path, device: str) -> str:
    """Try TensorRT for RTX on this GPU, which may not be on its list, and return what it says."""
    from ...export.plans.build import build_plans
    from ...export.plans.roles import BuildOptions

    options = BuildOptions("tensorrt-rtx", batch=(1, 4), siblings=4, draft_trees=True, unfused_attention=True)
    try:
        build_plans(bundle, options, say)
        params = SamplingParams(max_new_tokens=32, temperature=0)
        ours, theirs = (
            {shape: texts(bundle, params, engine, device, shape) for shape in RTX_SHAPES}
            for engine in ("tensorrt", "torch")
        )
    except TrtSpecError as error:
        return f"no: {error}"
    others = [str(shape) for shape in RTX_SHAPES if ours[shape] != theirs[shape]]
    return "yes, its texts are " + (f"not, for {', '.join(others)}, " if others else "") + "those of the engine torch"


def grown_pair(work: Path, name: str, dtype: str) -> str:
    """Return the folder with the checkpoints of a grown pair and their bundle, which are made once."""
    folder = work / f"grown-{name}"
    if not (folder / "bundle" / "manifest.json").exists():
        for role, shape in zip(("target", "draft"), SHAPES[name], strict=True):
            source = TARGET if role == "target" else DEMO_DRAFTS["model"]
            say(f"{name}: {role}")
            if shape is None:
                shutil.copytree(source, folder / role, dirs_exist_ok=True)
            else:
                grow(source, folder / role, shape, getattr(torch, dtype))
        exported(folder / "bundle", folder / "target", folder / "draft", dtype)
    return str(folder)


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def report(work: Path, device: str, pairs: Sequence[str], new_tokens: int, out: Path | None) -> dict[str, Any]:
    """Run part by part, and keep what was found after each; a part that fails says why and stops no other."""
    refuse_device(device)
    work.mkdir(parents=True, exist_ok=True)
    dtype = "float32" if device == "cpu" else "bfloat16"
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(device) if device != "cpu" else "cpu"}
    found |= {"parity": [], "speed": [], "failed": {}}

    parts: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
        ("bandwidth_bytes_per_second", read_bandwidth, (device,)),
        *(("parity", parity, (work, device, engine, new_tokens)) for engine in ("torch", "onnxruntime")),
        ("coupled", coupled_ties, (work, device, "torch", new_tokens)),
    ]
    if device != "cpu":
        parts.append(("tensorrt_for_rtx", try_rtx, (work / "demo-float16", device)))
    for pair in pairs:
        target, draft, bundle = (work / f"grown-{pair}" / name for name in ("target", "draft", "bundle"))
        parts += [
            (f"grown {pair}", grown_pair, (work, pair, dtype)),
            *(("speed", speeds, (pair, bundle, device, mode, new_tokens)) for mode in MODES),
            (f"transformers {pair}", transformers_speeds, (target, draft, dtype, device, new_tokens)),
        ]
    for number, (name, run_part, arguments) in enumerate(parts, 1):
        say(f"part {number} of {len(parts)}: {name.replace('_', ' ')}")
        try:
            result = run_part(*arguments)
        except Exception as error:  # any library may raise anything: the error is the result of this part
            found["failed"][name] = f"{type(error).__name__}: {first_line(error)}"
        else:
            found[name] = found[name] + result if isinstance(result, list) else result
        release()
        if out is not None:
            out.write_text(json.dumps(found) + "\n", encoding="utf-8")
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="keeps checkpoints and bundles")
    parser.add_argument("--device", default="cuda", metavar="D", help="default cuda; cpu tries the report itself out")
    parser.add_argument(
        "--shapes", nargs="*", choices=list(SHAPES), default=list(SHAPES), help="sizes of the pairs (default: all)"
    )
    add_number(parser, "--new-tokens", 128, "of each output")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file as well")


def run(arguments: argparse.Namespace) -> int:
    try:
        found = report(arguments.work, arguments.device, arguments.shapes, arguments.new_tokens, arguments.json)
    except OSError as error:
        raise RequestError(f"the report cannot be kept ({error}); name another --work or --json") from error
    for rows in (found["parity"], found["speed"]):
        if rows:
            numbers = {key for row in rows for key, value in row.items() if isinstance(value, float)}
            columns = {key: (key, ".3g" if key in numbers else "") for key in rows[0]}
            print(f"\n{table_of(rows, columns, left=2)}")
    for part, reason in found["failed"].items():
        print(f"\n{part} failed: {reason}")
    print(json.dumps(found))
    return 1 if found["failed"] else 0


main = program("gpu_report", __doc__, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
