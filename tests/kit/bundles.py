"""Bundles for tests: exported from tiny checkpoints, given other drafts, or damaged on purpose."""

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import torch
from filelock import FileLock
from onnx import numpy_helper
from transformers import AutoModelForCausalLM
from trt_spec.engines import Bundle
from trt_spec.engines.bundle import NGRAMS, put_file
from trt_spec.export.pipeline import export_bundle
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.drafters import DRAFTERS
from trt_spec.runtime.drafters.ngram_table import SUFFIX, to_bytes
from trt_spec.tools.making.count_ngrams import count_ngrams

from .traces import sharing_traces

exports: Path | None = None  # where a run of the tests keeps the bundles that it has exported
DRAFTERS_OF_A_PAIR = [name for name, kind in DRAFTERS.items() if kind.usual]


@dataclass(frozen=True)
class Pair:
    """A target's checkpoint and the bundle that holds it with a draft."""

    checkpoint: Path
    bundle: Path

    @cached_property
    def reference(self) -> Any:
        """transformers running the checkpoint in float32: the oracle of all."""
        return AutoModelForCausalLM.from_pretrained(self.checkpoint, dtype=torch.float32).eval()

    @cached_property
    def exact(self) -> Any:
        """The same in float64."""
        return AutoModelForCausalLM.from_pretrained(self.checkpoint, dtype=torch.float64).eval()


def export_pair(target: Path, out: Path, draft: Path | Sequence[Path] | None = None, **options: Any) -> Pair:
    """Export as `export_bundle` does, unchecked, or copy what a test of this run has exported before from the same.

    What torch has traced before it does not trace again.
    """
    named = hashlib.sha256(repr(sorted(options.items())).encode())
    drafts = [] if draft is None else [draft] if isinstance(draft, Path) else draft
    for file in (file for folder in (target, *drafts) for file in sorted(folder.iterdir())):
        named.update(f"{file.parent.name}/{file.name}".encode() + file.read_bytes())
    assert exports is not None, "conftest.py names a folder"
    kept = exports / named.hexdigest()
    with FileLock(kept.with_suffix(".lock")):
        if not kept.exists():
            with sharing_traces():
                export_bundle(target, kept, drafts, check=False, **options)
    shutil.copytree(kept, out)
    return Pair(target, out)


def tiny_pair(make: Callable[..., Path], folder: Path, noise: float, **config: Any) -> Pair:
    pair = export_pair(make(folder / "checkpoint", **config), folder / "target-alone")
    return with_ngrams(pair_of(pair, noisy_draft(pair.bundle, folder / "bundle", noise)))


def with_ngrams(pair: Pair, order: int = 3, tokens: int = 1000) -> Pair:
    """The bundle with n-grams counted from what its own target says."""
    params = [
        SamplingParams(temperature=1.0, max_new_tokens=100, ignore_eos=True, seed=i) for i in range(tokens // 100)
    ]
    with Decoder.open(pair.bundle) as decoder:
        outputs = decoder.generate([[2 + i % 6] for i in range(len(params))], params, draft_length=0)
        said = np.array([token for output in outputs for token in output.token_ids])
        put_file(decoder.bundle, NGRAMS, SUFFIX, to_bytes(*count_ngrams(said, decoder.vocab_size, order, most=10**6)))
    return pair


def pair_of(pair: Pair, bundle: Path) -> Pair:
    return replace(pair, bundle=bundle)


def noisy_draft(bundle: Path, out: Path, noise: float, seed: int = 0, name: str = "draft") -> Path:
    """The bundle with a draft that is its target with noise in every weight, relative to the weight's own spread."""
    shutil.copytree(bundle, out, dirs_exist_ok=True)
    shutil.rmtree(out / name, ignore_errors=True)
    (out / name).mkdir()
    random = np.random.default_rng(seed)

    def disturb(weights: np.ndarray) -> np.ndarray:
        spread = np.float32(noise * weights.std())
        return weights + random.standard_normal(weights.shape, np.float32) * spread

    rewrite_graph(out, name, out / "target" / "model.onnx", disturb)
    opened = Bundle.open(bundle)
    contract = opened.target.contract.without_adapters
    models = opened.models | {name: replace(opened.target, kind="draft", contract=contract)}
    replace(opened, path=out, models=models).save()
    return out


def rewrite_graph(bundle: Path, role: str, source: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Save the graph `source` as the bundle's `role` with every float weight changed; the manifest stays as it is."""
    graph = onnx.load(source)
    read = [name for node in graph.graph.node for name in node.input]
    stored = {weight.name: numpy_helper.to_array(weight) for weight in graph.graph.initializer}
    # Matrices in the order in which layers read them, merged ones in parts: how a graph stores them changes no draft.
    for weight in sorted(graph.graph.initializer, key=lambda one: read.index(one.name) if ".T" in one.name else -1):
        values = stored[weight.name]
        if values.dtype == np.float32 and values.size > 1:
            columns = stored.get(f"{weight.name}.columns", values.shape[-1:])
            parts = np.split(values, np.cumsum(columns)[:-1], axis=-1)
            changed = np.concatenate([change(part) for part in parts], axis=-1)
            weight.CopyFrom(numpy_helper.from_array(changed, weight.name))
    save_graph(graph, bundle, role)


def save_graph(graph: onnx.ModelProto, bundle: Path, role: str) -> None:
    for name in ("model.onnx", "weights.bin", "onnxruntime.onnx"):
        (bundle / role / name).unlink(missing_ok=True)
    onnx.save_model(
        graph,
        bundle / role / "model.onnx",
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=64,
        convert_attribute=False,
    )


def without_fused(bundle: Path, out: Path) -> Path:
    """The bundle with no graphs but those that all engines read."""
    shutil.copytree(bundle, out, ignore=shutil.ignore_patterns("onnxruntime.onnx"))
    resave(out)
    return out


def resave(bundle: Path) -> None:
    """Hash the files anew, as someone who forges a bundle would."""
    opening = "trt_spec.engines.bundle.bundle"
    with patch(f"{opening}.require_whole"), patch(f"{opening}.require_unchanged"):
        opened = Bundle.open(bundle)
    opened.save()
