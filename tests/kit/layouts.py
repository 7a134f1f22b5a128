"""How the tensors lie that the engine torch gives to its kernels, which read addresses and ask nobody.

Each kernel is told the strides of some arguments, and takes all others to lie whole. The numbers of the last axis lie
side by side in any; where they do not, or where rows are no rows of one tensor, a kernel is given a copy.
"""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from trt_spec.engines import Bundle
from trt_spec.engines.bundle import ADAPTED
from trt_spec.engines.torch import TorchEngine

PAST = {"past_keys", "past_values"}  # written in place, so there is no copy
STRIDED = {  # arguments of each operator whose strides its kernel is told
    "add_norm": {"residual", "x"},
    "angles": {"depths"},
    "attention": {"ancestors", "depths", "key", "query", "start", "value"},
    "gate": {"gate", "up"},
    "narrow_product": {"x"},
    "norm": {"x"},
    "norm_add": {"residual", "x"},
    "product": {"residual", "x"},
    "rotate": {"cos", "sin", "x"},
    "rotate_write": {"cos", "keys", "queries", "sin", "values"} | PAST,
    "write": {"keys", "values"} | PAST,
}
BY_AXES = {"attention", "rotate", "rotate_write", "write"}  # others read rows
SIZES = {"batch": 2, "capacity": 64, "columns": 8, "pending": 4, "rows": 3, "slots": 8, "source": 6}
WIDTHS = (3, 20)  # for which there are steps of few rows of tokens and of more


class Given(NamedTuple):
    operator: str
    argument: str


class Reading(fx.Interpreter):
    """Runs a converted graph on tensors without data, and keeps which arguments of operators lie otherwise."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.operators = set[str]()
        self.misread, self.copied = set[Given](), set[Given]()

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return super().get_attr(target, args, kwargs).to("meta")

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if str(target).startswith("trt_spec."):
            name = str(target).split(".")[1]
            self.operators.add(name)
            names = [argument.name for argument in getattr(torch.ops.trt_spec, name).default._schema.arguments]
            for argument, given in [*zip(names, args, strict=False), *kwargs.items()]:
                if isinstance(given, Tensor):
                    self._look(Given(name, argument), given)
        return super().call_function(target, args, kwargs)

    def _look(self, given: Given, x: Tensor) -> None:
        side_by_side = not x.dim() or x.shape[-1] == 1 or x.stride(-1) == 1
        if given.argument not in STRIDED[given.operator]:
            if not x.is_contiguous():
                self.misread.add(given)
        elif given.argument in PAST:
            if not side_by_side:
                self.misread.add(given)
        elif not side_by_side or not (given.operator in BY_AXES or _in_rows(given, x)):
            self.copied.add(given)


def _in_rows(given: Given, x: Tensor) -> bool:
    """Whether a kernel that reads rows, or a norm that reads groups of them, reads this tensor where it lies."""
    groups = (
        (-1, x.shape[-2], x.shape[-1]) if given.argument == "x" and "norm" in given.operator and x.dim() > 3 else ()
    )
    try:
        x.view(groups or (-1, x.shape[-1]))
    except RuntimeError:
        return False
    return True


def reading_of(engine: TorchEngine, width: int) -> Reading:
    """Read the graph of steps of this width, over the first entries of longer caches."""
    sizes = SIZES | {"width": width, "tail": width}

    def memory(name: str, shape: list[int], dtype: str) -> Tensor:
        found = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        if name in engine.contract.cache_names:
            found = torch.cat((found, found), 2)[:, :, : shape[2]]
        return found

    given = [
        memory(spec.name, [sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape], spec.dtype)
        for spec in (*engine._called.inputs, *engine._computed)
    ]
    reading = Reading(engine.converted(sizes))
    reading.run(*given)
    return reading


def assert_kernels_read_what_is_there(bundle: Path, copied: frozenset[Given] = frozenset()) -> set[str]:
    """Return the operators of a bundle's models, none of whose kernels misreads one, or copies others than these.

    Of a target with room for adapters that graph is read, too.
    """
    opened, operators = Bundle.open(bundle), set[str]()
    for name, model in opened.models.items():
        graph, open_weightless = opened.graph(name), partial(TorchEngine, compiled=False, weightless=True)
        engines = [open_weightless(graph, model.contract, "cpu")]
        if model.contract.adapters is not None:
            engines.append(open_weightless(graph.with_name(ADAPTED + graph.name), model.contract, "cpu", known={}))
        for reading in (reading_of(engine, width) for engine in engines for width in WIDTHS):
            assert not reading.misread, f"{name}: kernels misread {sorted(reading.misread)}"
            assert reading.copied <= copied, f"{name}: kernels copy {sorted(reading.copied - copied)}"
            operators |= reading.operators
    return operators
