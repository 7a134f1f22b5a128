"""Room for the adapters of requests, which only a target gets."""

from typing import Any

import onnx_ir as ir

from ...engines import Adapters, Contract
from ...engines.bundle import FUSED, GRAPH, TARGET
from ..checking.check import given_sources
from ..checking.check_adapters import AdapterReference, check_adapters
from ..checking.oracle import Reference
from ..passes.adapt import adaptable, linear_modules, write_adapted
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
