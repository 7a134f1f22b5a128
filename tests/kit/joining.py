"""Heads as an export joins them to their target, checks their graphs, and refuses their files."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from trt_spec.export.checking.quality import Sample
from trt_spec.export.checkpoints.checkpoint import open_checkpoint
from trt_spec.export.kinds import LoadedHead, check_head, open_head
from trt_spec.export.writing.graph import build_graph, write_graph
from trt_spec.export.writing.quiet import quiet_libraries

VOCAB, HIDDEN = 64, 32  # of the target


def loaded(head: Path, target: Path, teacher: Any, tokens: Sequence[int]) -> LoadedHead:
    """Read a head for its target, of which `teacher` is the model, and wire it by these tokens."""
    opened = open_head(head, target)
    assert opened is not None
    sample = Sample(list(tokens), VOCAB)
    return opened.kind.load(opened, teacher, open_checkpoint(target).shape.contract(256, "float32"), sample)


def write(head: LoadedHead, folder: Path) -> Path:
    """Trace a head and write its graph into a folder, by whose name the check calls it."""
    with quiet_libraries():
        graph, _ = build_graph(head.module, head.contract, 256)
    write_graph(graph, folder)
    return folder / "model.onnx"


def check(
    head: LoadedHead, graph: Path, tokens: Sequence[int], features: torch.Tensor | None = None
) -> tuple[dict[str, Any], torch.Tensor]:
    """Compare its graph with what it says in torch of these features, random ones if none are given."""
    if features is None:
        features = torch.randn(len(tokens), HIDDEN, generator=torch.Generator().manual_seed(0))
    return check_head(graph, head.contract, head.module, torch.tensor(tokens), features, False)


def change(head: Path, **fields: Any) -> None:
    """Change fields of its configuration."""
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | fields))


def edit(head: Path, change_tensors: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change its tensors."""
    tensors = load_file(head / "model.safetensors")
    change_tensors(tensors)
    save_file(tensors, head / "model.safetensors", metadata={"format": "pt"})


def without(head: Path, name: str) -> None:
    edit(head, lambda tensors: tensors.pop(name))
