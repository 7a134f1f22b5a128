"""Compare a graph that has room for adapters with the checkpoint, whose rows have none or one of two random ones."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn

from ...engines import (
    ADAPTER,
    FREE,
    MOST_READ,
    OWNERS,
    Adapters,
    AnyContract,
    Contract,
    Engine,
    ExportError,
    blank_cache,
    cache_rows,
    make_step,
    open_engine,
)
from ...engines.bundle import ADAPTED
from ..passes.adapt import adapt
from .check import TOLERANCE, in_float32, unrounded
from .oracle import checkpoint_logits, given_the_first

LONGEST = 24  # tokens of the text that each row reads: every product takes part in each
ROWS = (0, 2, 1)  # their adapters
LAST_BITS = 1e-5  # of the logits' standard deviation, by which operators that are joined otherwise may differ
SIZE = 0.5  # of what an adapter adds to a product, beside the product itself


class RandomAdapters:
    """Two adapters, as a graph with room for them is given them, and as hooks beside a checkpoint's products."""

    def __init__(self, model: nn.Module, adapters: Adapters) -> None:
        generator = torch.Generator().manual_seed(0)
        columns = len(ROWS) * adapters.rank
        self.owners = torch.tensor((FREE, 1, 2)).repeat_interleave(adapters.rank)
        self.matrices: dict[str, Tensor] = {}
        modules = dict(model.named_modules())
        self._modules = {one: modules[one.name] for one in adapters.products}
        for one, module in self._modules.items():
            weight: Any = module.weight
            weight = weight.detach().float()
            size = (SIZE * float(weight.std()) / adapters.rank**0.5) ** 0.5
            for name, width in ((one.down, one.inputs), (one.up, one.outputs)):
                self.matrices[name] = torch.randn(columns, width, generator=generator) * size

    def given(self) -> dict[str, Tensor]:
        """Return the inputs of a call whose rows have them as ROWS says."""
        return {ADAPTER: torch.tensor(ROWS), OWNERS: self.owners} | self.matrices

    def beside(self, adapter: int) -> AbstractContextManager[None]:
        """Let the checkpoint have one of them, or none, until the block ends."""
        own = {
            module: tuple(self.matrices[name][self.owners == adapter] for name in (one.down, one.up))
            for one, module in self._modules.items()
        }
        return adapted(own if adapter else {})


class AdapterReference:
    """What a checkpoint says of a text without an adapter and with two random ones."""

    def __init__(self, model: nn.Module, adapters: Adapters, tokens: list[int], sources: Any = ()) -> None:
        self.tokens, random = tokens[:LONGEST], RandomAdapters(model, adapters)
        self.given, self.logits = random.given(), []
        for adapter in ROWS:
            with random.beside(adapter), given_the_first(model, sources):
                self.logits.append(checkpoint_logits(model, self.tokens))


@contextmanager
def adapted(modules: Mapping[nn.Module, tuple[Tensor, ...]]) -> Iterator[None]:
    """Add to what these modules give what an adapter makes of what they read, until the block ends."""
    hooks = [
        module.register_forward_hook(
            lambda _, given, found, down=down, up=up: found + (given[0].to(down.dtype) @ down.T @ up).to(found.dtype)
        )
        for module, (down, up) in modules.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def under_another_name(graph: Path, contract: AnyContract) -> Iterator[Path]:
    """Give a copy of a graph, with that for adapters beside it, so that an engine opens no other in its place."""
    copy = graph.with_name(f"copy.{graph.name}")
    beside, made = (one.with_name(ADAPTED + one.name) for one in (graph, copy))
    try:
        shutil.copy(graph, copy)
        if beside.exists():
            shutil.copy(beside, made)
        else:  # of a float32 copy
            assert contract.adapters is not None
            model = ir.load(graph)
            adapt(model, contract.adapters)
            ir.save(model, made)
        yield copy
    finally:
        copy.unlink(missing_ok=True)
        made.unlink(missing_ok=True)


def check_adapters(
    graph: Path, contract: Contract, reference: AdapterReference, scale: float, source: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return the worst error, and whether a row without an adapter has the same bits as in the graph alone.

    It has them unless the library joins other operators where something is added, and then all but the last.
    """
    assert contract.adapters is not None
    with (
        in_float32(graph, contract) as (graph, contract),
        unrounded(graph, contract) as (graph, contract),
        under_another_name(graph, contract) as copy,
    ):
        engine = open_engine("onnxruntime", copy, contract, exact_weights=True)
        try:
            plain, found = _run(engine, reference, False, source), _run(engine, reference, True, source)
        finally:
            engine.close()
    off = float((plain[0] - found[0]).abs().max())
    if not off <= LAST_BITS * scale:
        raise ExportError(
            f"the {graph.parent.name} graph with adapters gives a row without one other logits than the graph alone, "
            f"by {off:.2g}; export without adapters, and please report it"
        )
    worst = max(float((ours - wanted).abs().max()) for ours, wanted in zip(found, reference.logits, strict=True))
    if not worst <= TOLERANCE * scale:
        raise ExportError(
            f"the {graph.parent.name} graph does not compute its adapters: a logit is off by {worst:.2g}, expected at "
            f"most {TOLERANCE * scale:.2g}; export without adapters, and please report it"
        )
    return {"worst_error": worst, "same_bits": off == 0}


def _run(engine: Engine, reference: AdapterReference, with_adapters: bool, source: Mapping[str, Tensor]) -> Tensor:
    """Return the logits [rows, S, V] of the text in each row, read in two calls."""
    contract, tokens, rows = engine.contract, reference.tokens, len(ROWS)
    cache, found = blank_cache(contract, rows, len(tokens)), []
    cache |= {name: tensor.expand(rows, *tensor.shape[1:]).contiguous() for name, tensor in source.items()}
    given = reference.given if with_adapters else {}
    most = min(len(tokens) // 2 + 1, MOST_READ)
    for begin in range(0, len(tokens), most):
        part = torch.tensor(tokens[begin : begin + most]).expand(rows, -1).contiguous()
        width = part.shape[1]
        inputs = {"input_ids": part, "start": torch.full((rows,), begin)} | given
        logits = torch.zeros(rows, width, contract.vocab_size)
        step = make_step(engine, cache_rows(contract, cache, 0, rows), inputs, {"logits": logits})
        if contract.recurrent:
            step.inputs["fold"].fill_(width)
        step.run()
        found.append(logits)
    return torch.cat(found, 1)
