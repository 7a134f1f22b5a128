"""What only a target gets: room for the adapters of requests, and shards."""

from typing import Any

import onnx_ir as ir

from ...engines import Adapters, Contract
from ...engines.bundle import FUSED, GRAPH, TARGET
from ..checking.check import given_sources
from ..checking.check_adapters import AdapterReference, check_adapters
from ..checking.check_shards import check_shards, whole_logits
from ..checking.oracle import Reference
from ..parallel.split import split
from ..passes.adapt import adaptable, linear_modules
from ..writing.graph import write_adapted
from .export import Export


class Room:
    """Room for adapters beside the products of a graph, and what the checkpoint says under some."""

    def __init__(self, export: Export, model: Any, graph: ir.Model, reference: Reference | None) -> None:
        products, settings = adaptable(graph, linear_modules(model)), export.settings
        self.adapters = Adapters(settings.adapters, settings.adapter_rank, products)
        self._folder, self._reference, self._says = export.folder / TARGET, reference, None
        if reference is not None:
            export.progress(f"{TARGET}: computing reference logits with adapters")
            self._says = AdapterReference(model, self.adapters, reference.sample.tokens, reference.heard)

    def write(self, contract: Contract, check: dict[str, Any]) -> int:
        """Write a graph with this room beside each that there is, and check it; return how many products have some."""
        found = write_adapted(self._folder, self.adapters)
        if self._says is not None and self._reference is not None:
            first = given_sources(contract, self._reference.sources[:1])
            for name in (GRAPH, FUSED):
                if (file := self._folder / name).exists():
                    check["adapters"] = check_adapters(file, contract, self._says, self._reference.scale, first)
        return found


def split_target(export: Export, contract: Contract, text: list[int] | None) -> Contract:
    """Split the target's graph into shards; return the contract of each."""
    folder, settings = export.folder / TARGET, export.settings
    if text is not None:
        export.whole = text, whole_logits(folder / GRAPH, contract, text)
    export.progress(f"{TARGET}: splitting it into {settings.shards} shards")
    contract, found = split(folder, contract, settings.shards, exact=settings.exact_sums)
    if settings.shards == 1:
        export.notes.append(f"{found.sums} sums of each call are made in float64")
        return contract
    export.notes.append(
        f"each of {settings.shards} shards holds {found.share:.1%} of the target's weights, and a call sums "
        f"{found.sums} times"
    )
    export.notes += [f"every shard holds {name} whole: {why}" for name, why in found.whole_for.items()]
    return contract


def check_split_target(export: Export, contract: Contract) -> None:
    """Compare the shards, each in a process of its own, with the graph before it was split."""
    shards = export.settings.shards
    if export.whole is not None and shards > 1:
        export.progress(f"{TARGET}: checking the shards in processes of their own")
        found = check_shards(export.folder / TARGET / GRAPH, contract, *export.whole)
        export.notes.append(f"the {shards} shards together: the worst logit is off by {found:.1e} deviations")
