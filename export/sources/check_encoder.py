"""Compare a written encoder in ONNX Runtime with the checkpoint's in torch, over sources of unlike lengths together."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ...engines import Adapters, EncoderContract, Engine, open_engine, output_name
from ..checking.check import Errors, in_float32
from ..checking.check_adapters import ROWS, RandomAdapters, under_another_name
from .with_source import WithSource

NO_MORE: Mapping[str, Tensor] = MappingProxyType({})
Made = list[dict[str, list[Tensor]]]  # of each source, what each model makes of it


def encoder_reference(models: Mapping[str, WithSource], sources: Sequence[Mapping[str, Tensor]]) -> Made:
    """Compute what the checkpoints make of each source by itself."""
    first = next(iter(models.values()))
    heard = [first.hears(source) for source in sources]
    return [{name: model.made_of(hidden) for name, model in models.items()} for hidden in heard]


def adapted_reference(
    models: Mapping[str, WithSource],
    sources: Sequence[Mapping[str, Tensor]],
    traced: nn.Module,
    room: Adapters,
) -> tuple[Made, Mapping[str, Tensor]]:
    """Compute the same of the first sources, each with a random adapter or none; and what a graph is given then."""
    adapters, made = RandomAdapters(traced, room), []
    for source, adapter in zip(sources, ROWS, strict=False):
        with adapters.beside(adapter):
            made += encoder_reference(models, [source])
    return made, adapters.given()


def check_encoder(
    graph: Path,
    contract: EncoderContract,
    sources: Sequence[Mapping[str, Tensor]],
    made: Made,
    quantised: bool,
    adapters: Mapping[str, Tensor] = NO_MORE,
) -> dict[str, Any]:
    """Refuse a graph that gives other keys and values; returns the errors, in standard deviations, for the manifest.

    With the inputs of `adapters` it is the graph that has room for them.
    """
    errors = Errors(1.0)
    with (
        in_float32(graph, contract) as (graph, contract),
        under_another_name(graph, contract) if adapters else nullcontext(graph) as graph,
    ):
        engine = open_engine("onnxruntime", graph, contract, exact_weights=quantised)
        try:
            found = run_encoder(engine, contract, sources[: len(made)], adapters)
        finally:
            engine.close()
    for place, each in enumerate(made):
        for model, states in contract.feeds.items():
            for state, expected in zip(states, each[model], strict=True):
                ours = found[output_name(model, state)][place, :, : expected.shape[2]]
                errors.compare(model, ours, expected[0], float(expected.std()))
    return errors.report(graph) | {"as_float32_copy": contract.dtype != "float32"}


def run_encoder(
    engine: Engine,
    contract: EncoderContract,
    sources: Sequence[Mapping[str, Tensor]],
    given: Mapping[str, Tensor] = NO_MORE,
) -> dict[str, Tensor]:
    """Run an encoder over several sources at once; shorter ones are padded with what it must not read."""
    if contract.sound is not None:
        inputs = {"sound": torch.cat([source["input_features"] for source in sources])}
        entries = contract.longest
    else:
        lengths = [source["input_ids"].shape[1] for source in sources]
        entries = max(lengths)
        padded = torch.full((len(sources), entries), contract.vocab_size - 1)
        for row, source in enumerate(sources):
            padded[row, : lengths[row]] = source["input_ids"][0]
        inputs = {"source_ids": padded, "source_length": torch.tensor(lengths)}
    outputs = {
        output_name(model, state): torch.zeros(state.memory(len(sources), entries))
        for model, states in contract.feeds.items()
        for state in states
    }
    engine.step({**inputs, **given}, outputs).run()
    return outputs
