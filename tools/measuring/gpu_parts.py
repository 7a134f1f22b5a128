"""What a report of a GPU measures: parity with transformers, speed by size, and whether TensorRT runs; row by row."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from ...engines import Bundle, TrtSpecError, open_engine
from ...export.checking.oracle import checkpoint_logits
from ...export.checking.quality import engine_logits
from ...export.pipeline import export_bundle
from ...runtime import Decoder, SamplingParams
from ...runtime.state.asked import DraftLength
from ..certificate.probe import Probe
from ..certificate.same_text import ask_plain, in_another_engine
from ..certificate.subject import Subject
from ..console import say
from ..making.growing import LlamaSize, grow
from ..making.kept_bundles import DEMO_DRAFTS, TARGET
from ..prompts.shipped import PYTHON_PROMPTS
from ..timing.bandwidth import read_bandwidth
from ..timing.clock import now
from ..timing.theirs import Theirs
from ..timing.time_rounds import Setting
from .bench import bench
from .budget import Row
from .gpu_prediction import predicted_rounds_ms
from .gpus import Gpu

DTYPES = ("float32", "float16", "bfloat16")
RTX_SHAPES: tuple[DraftLength, ...] = (4, "4/8")
SHAPES = {  # of target and draft; None is the demo draft itself
    "0.1B": (LlamaSize(768, 12, 12, 4, 2048), None),
    "1B": (LlamaSize(2048, 16, 32, 8, 8192), None),
    "3B": (
        LlamaSize(3072, 28, 48, 16, 8192),
        LlamaSize(2048, 16, 32, 8, 8192),
    ),  # of Llama 3.2's 3B and 1B, heads of 64
    "8B": (LlamaSize(4096, 32, 64, 16, 14336), None),
}
MODES = {"eager": ("torch", False), "captured": ("torch", True), "compiled": ("torch-compiled", True)}
MAX_LENGTH = 1024


class Speed(NamedTuple):
    """Settings that are measured in turn."""

    mode: str
    batch: int
    temperature: float
    draft_lengths: str
    seconds: float  # that they take at least


def bandwidth(device: str) -> Iterator[Row]:
    yield {"bytes_per_second": read_bandwidth(device)}


def parity(work: Path, device: str, engine: str, dtype: str, new_tokens: int) -> Iterator[Row]:
    """Compare logits with the checkpoint's, and greedy text with that of ONNX Runtime on the CPU."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    tokens: list[int] = Tokenizer.from_file(str(TARGET / "tokenizer.json")).encode("".join(PYTHON_PROMPTS)).ids
    expected = checkpoint_logits(model, tokens)
    params = SamplingParams(max_new_tokens=new_tokens, temperature=0)
    reference = texts(exported(work / "demo-float32", TARGET, DEMO_DRAFTS["model"], "float32"), params)
    bundle = exported(work / f"demo-{dtype}", TARGET, DEMO_DRAFTS["model"], dtype)
    found = engine_logits_of(bundle, engine, device, tokens)
    same = sum(a == b for a, b in zip(texts(bundle, params, engine, device), reference, strict=True))
    error = float((found - expected).norm() / expected.norm())
    yield {"engine": engine, "dtype": dtype, "logit_error": error, "same_text": f"{same} of {len(reference)}"}


def coupled_ties(work: Path, device: str, engine: str, new_tokens: int) -> Iterator[Row]:
    """Compare the coupled rule on the device with plain decoding on the CPU; the arbiter judges each difference."""
    bundle = exported(work / "demo-float32", TARGET, DEMO_DRAFTS["model"], "float32")
    here = Subject(Bundle.open(bundle), "onnxruntime", "cpu", batch=4)
    params = SamplingParams(max_new_tokens=new_tokens, temperature=1.0, rule="coupled", seed=11)
    asked = ask_plain(here, [(prompt, params) for prompt in here.prompts()])
    probe = Probe(here)
    try:
        found = in_another_engine(replace(here, engine=engine, device=device), asked, probe)
    finally:
        probe.close()
    yield {"engine": engine, "passed": found.passed, "numbers": found.numbers}


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


def speeds(pair: str, bundle: Path, device: str, asked: Speed, new_tokens: int) -> Iterator[Row]:
    """Measure settings in turn; those that the model of the GPU knows are shown beside its prediction."""
    engine, capture = MODES[asked.mode]
    flags = ("--draft-lengths", asked.draft_lengths, "--max-new-tokens", new_tokens, "--repeats", 1)
    with Decoder.open(bundle, engine, device, asked.batch, capture=capture) as decoder:
        result = bench(decoder, *flags, "--temperature", asked.temperature)
    roof, known = result["roof"], asked.mode == "captured" and not asked.temperature
    gpu = Gpu(device, roof["bandwidth_bytes_per_second"])
    of = {"pair": pair, "mode": asked.mode, "batch": asked.batch, "temperature": asked.temperature}
    lengths = [one["draft_length"] for one in result["settings"]] if known else []
    predicted = predicted_rounds_ms(Bundle.open(bundle), gpu, asked.batch, lengths)
    for one in (*result["settings"], *result["shapes"]):
        ms = None if "shape" in one else predicted.get(one["draft_length"])
        yield of | speed_of(one, roof["roof_ms"]) | {"predicted_ms": ms}


def compiled_starts(pair: str, bundle: Path, device: str) -> Iterator[Row]:
    """Time the first text of torch-compiled twice; the second start finds what the first has compiled."""
    from torch._dynamo.utils import counters

    for start in ("first", "second"):
        counters.clear()
        began = now()
        with Decoder.open(bundle, "torch-compiled", device, 1) as decoder:
            decoder.generate(PYTHON_PROMPTS[:1], SamplingParams(max_new_tokens=24, temperature=0), draft_length=4)
        found = counters["inductor"]
        of = {"pair": pair, "start": start, "seconds": now() - began}
        yield of | {"compiled": found["fxgraph_cache_miss"], "found": found["fxgraph_cache_hit"]}


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


def transformers_speeds(pair: str, folder: Path, dtype: str, device: str, new_tokens: int) -> Iterator[Row]:
    """Measure transformers' generate, then its assisted generation with K = 4: greedy, one prompt at a time."""
    from ..peers.against_transformers import PLAIN, Transformers

    target = folder / "target"
    other = Transformers(target, folder / "draft", dtype, device)
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    prompts = [tokenizer.encode(prompt).ids for prompt in PYTHON_PROMPTS]
    params = [SamplingParams(max_new_tokens=new_tokens, temperature=0)] * len(prompts)
    for setting in (PLAIN, Setting(4, "model")):
        other.measure(prompts[:1], params[:1], Theirs(setting))
        found = Theirs(setting)
        other.measure(prompts, params, found)
        of = {"pair": pair, "mode": "transformers", "batch": 1, "temperature": 0.0}
        yield of | {"draft_length": setting.draft_length, "tokens_per_second": found.tokens_per_second[0]}


def try_rtx(work: Path, device: str) -> Iterator[Row]:
    """Try TensorRT for RTX on this GPU, which may not be on its list, and tell what it says."""
    from ...export.plans.build import build_plans
    from ...export.plans.roles import BuildOptions

    bundle = exported(work / "demo-float16", TARGET, DEMO_DRAFTS["model"], "float16")
    options = BuildOptions("tensorrt-rtx", batch=(1, 4), siblings=4, draft_trees=True, unfused_attention=True)
    try:
        build_plans(bundle, options, say)
        params = SamplingParams(max_new_tokens=32, temperature=0)
        ours, theirs = (
            {shape: texts(bundle, params, engine, device, shape) for shape in RTX_SHAPES}
            for engine in ("tensorrt", "torch")
        )
    except TrtSpecError as error:
        yield {"runs": f"no: {error}"}
        return
    others = [str(shape) for shape in RTX_SHAPES if ours[shape] != theirs[shape]]
    not_all = f"not, for {', '.join(others)}, " if others else ""
    yield {"runs": f"yes, its texts are {not_all}those of the engine torch"}


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
