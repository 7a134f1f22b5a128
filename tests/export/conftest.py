"""What the exporter's tests share: an oracle for each family's graph, and a small bundle that went all the way."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from trt_spec.engines import Bundle, Contract
from trt_spec.export import ExportReport, export_bundle
from trt_spec.export.checking.oracle import Reference
from trt_spec.export.checking.quality import Sample
from trt_spec.export.checkpoints.checkpoint import load_model, open_checkpoint

from ..kit.bundles import Pair, export_pair
from ..kit.families import tiny_checkpoint
from ..kit.models import tiny_gpt2, tiny_llama
from ..kit.traces import sharing_traces


@dataclass(frozen=True)
class Graph:
    """A family's exported graph with what its checkpoint says of the built-in check's calls."""

    checkpoint: Path
    folder: Path  # of model.onnx and weights.bin
    contract: Contract
    reference: Reference

    @property
    def file(self) -> Path:
        return self.folder / "model.onnx"


def graph_of(pair: Pair) -> Graph:
    checkpoint = open_checkpoint(pair.checkpoint)
    contract = Bundle.open(pair.bundle).target.contract
    model = load_model(checkpoint, "float32")
    sample = Sample([5, 9, 3, 40, 41, 7], 64)
    reference = Reference(model, contract, sample, checkpoint.shape.window)
    reference.answer(model)
    return Graph(pair.checkpoint, pair.bundle / "target", contract, reference)


@pytest.fixture(scope="session")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    folder = tmp_path_factory.mktemp("recurrent")
    return graph_of(export_pair(tiny_checkpoint("granitemoehybrid", folder / "checkpoint"), folder / "bundle"))


@pytest.fixture(scope="session")
def graphs(pairs) -> Callable[[str], Graph]:
    made: dict[str, Graph] = {}

    def graph(family: str) -> Graph:
        if family not in made:
            made[family] = graph_of(pairs(family))
        return made[family]

    return graph


@pytest.fixture
def shared_traces() -> Iterator[None]:
    """For claims of what is made of a trace: each configuration is traced once."""
    with sharing_traces():
        yield


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> ExportReport:
    """A Llama with a GPT2 as draft, both of one layer, one with a padded vocabulary."""
    folder = tmp_path_factory.mktemp("exported")
    target = tiny_llama(folder / "target", padded_vocab=72, num_hidden_layers=1)
    draft = tiny_gpt2(folder / "draft", n_layer=1)
    return export_bundle(target, folder / "bundle", draft=draft)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of heads."""
    return tiny_llama(tmp_path_factory.mktemp("target") / "target", initializer_range=0.2, num_hidden_layers=4)


@pytest.fixture(scope="session")
def teacher(target: Path) -> Any:
    """Its model."""
    return load_model(open_checkpoint(target), "float32")
