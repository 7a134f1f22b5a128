"""Count the kernels that torch operations launch on a GPU, and the bytes that each reads and writes, without a GPU.

The operations run on tensors without data. What is known of each is a row of a table here; an operator of our own says
how many kernels it launches where it is declared.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCT, ATTENTION, NORM, WRITE = "product", "attention", "norm", "write"
REDUCTION, POINTWISE, FILL = "reduction", "pointwise", "fill"
NAMESPACE = "trt_spec"  # of the operators of our own

WHOLE = {  # functions that torch computes in one kernel on a GPU, and in many where there is none
    F.scaled_dot_product_attention: ATTENTION,
    torch.rms_norm: NORM,
    F.rms_norm: NORM,
    torch.layer_norm: NORM,
    F.layer_norm: NORM,
}
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "_int_mm", "_weight_int4pack_mm", "_weight_int8pack_mm")
WRITES = ("index_put", "index_put_", "scatter", "scatter_", "scatter_add", "scatter_add_", "index_copy_")
READS = ("index", "gather", "embedding", "index_select")  # of single rows of what is larger
REDUCTIONS = (
    *("argmax", "argmin", "amax", "amin", "max", "min", "sum", "mean", "any", "all", "prod", "var", "logsumexp"),
    *("_softmax", "_log_softmax", "cumsum", "cumprod", "searchsorted", "topk", "sort"),
)
FILLS = ("zero_", "fill_", "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "arange", "scalar_tensor")
NOTHING = (
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "_unsafe_view",
    "_reshape_alias",
    "detach",
    "lift_fresh",
)
SEVERAL = {"topk": 4, "sort": 4, "cumsum": 2}  # kernels of those that launch more than one
SPLIT_FROM = 1024  # numbers that a product adds up, from which it is split among blocks if it has no more results


class Launch(NamedTuple):
    """A kernel."""

    kind: str  # one of those above, or the full name of an operator of our own
    bytes: int
    rows: int = 1  # of a product or a norm


class Launches:
    """The kernels of all operations in a `with` block, in their order."""

    def __init__(self, own: Mapping[str, int | Callable[..., int]]) -> None:
        self.found: list[Launch] = []
        self.touched: dict[int, int] = {}  # how many came before the first that took this memory
        self._own = own  # how many kernels each operator of our own launches, or launches for its arguments
        self._in_whole = False

    @contextmanager
    def counted(self) -> Iterator[None]:
        with _Functions(self), _Operations(self):
            yield

    def whole(self, kind: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function that is one kernel."""
        self._touch((args, kwargs))
        self._in_whole = True
        try:
            output = func(*args, **kwargs)
        finally:
            self._in_whole = False
        rows = output.numel() // output.shape[-1] if kind == NORM else 1
        self.found.append(Launch(kind, _bytes((args, kwargs, output)), rows))
        return output

    def operation(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        if self._in_whole:
            return
        self._touch((args, kwargs))
        namespace, name = func._schema.name.split("::")
        if namespace == NAMESPACE:
            own = self._own[name]
            count = own if isinstance(own, int) else own(*args, **kwargs)
            each = (_bytes(_only_read(func, args, kwargs)) + _bytes(output)) // max(1, count)
            self.found += [Launch(func._schema.name, each)] * count
        elif name in PRODUCTS:
            self.found += _product(args, output)
        elif not (func.is_view or name in NOTHING):
            self.found += _other(name, args, kwargs, output)

    def _touch(self, values: Any) -> None:
        for tensor in _tensors(values):
            self.touched.setdefault(memory_of(tensor), len(self.found))


def memory_of(tensor: Tensor) -> int:
    """Return what tells the memory of a tensor from any other."""
    return int(tensor.untyped_storage()._cdata)


class _Functions(TorchFunctionMode):
    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self._launches = launches

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (kind := WHOLE.get(func)) is not None:
            return self._launches.whole(kind, func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    def __init__(self, launches: Launches) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._launches = launches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self._launches.operation(func, args, kwargs or {}, output)
        return output


def _product(args: Any, output: Tensor) -> list[Launch]:
    """A product of few rows reads a matrix once; where its results are few it is split along what it adds up."""
    *_, rows, results = output.shape if output.dim() > 1 else (1, output.numel())
    added = _tensors(args)[-1].shape[-2] if output.dim() > 1 else 1
    found = [Launch(PRODUCT, _bytes((args, output)), rows)]
    if results <= added >= SPLIT_FROM:
        found.append(Launch(POINTWISE, 2 * _bytes(output)))
        if results < added:
            found.append(Launch(FILL, 0))
    return found


def _other(name: str, args: Any, kwargs: Any, output: Any) -> list[Launch]:
    size = _bytes((args, kwargs, output))
    if name in WRITES:
        made = _copied_indices(args[1]) if name.startswith("index_put") else 0
        copied = [] if name.endswith("_") else [Launch(POINTWISE, 2 * _bytes(output))]  # of what is written into
        written = _bytes(_tensors(args)[-1])
        return [*[Launch(POINTWISE, 0)] * made, *copied, Launch(WRITE, 2 * written)]
    if name in READS:
        return [Launch(POINTWISE, 2 * _bytes(output))]
    if name in REDUCTIONS:
        return [Launch(REDUCTION, size)] * SEVERAL.get(name, 1)
    if name in FILLS:
        return [Launch(FILL, _bytes(output))]
    if name == "roll" and not args[0].is_contiguous():
        return [Launch(POINTWISE, size)] * 2
    return [Launch(POINTWISE, size)]


def _copied_indices(indices: Any) -> int:
    """Several indices are brought to one layout by copies, because the kernel knows only one."""
    broadcast: Any = torch.broadcast_tensors  # torch leaves it untyped
    given = broadcast(*[index for index in indices if index is not None])
    if len({index.stride() for index in given}) == 1:
        return 0
    return sum(not index.is_contiguous() for index in given)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _only_read(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an operator does not write to: of a cache it writes as much as it is given to write."""
    given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | (kwargs or {})
    return [given.get(one.name) for one in func._schema.arguments if one.alias_info is None]


def _bytes(values: Any) -> int:
    """Return the bytes of all tensors, each memory once, and a place that is read again and again once."""
    own: dict[tuple[int, int], int] = {}
    for tensor in _tensors(values):
        places = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            places *= size if stride else min(size, 1)
        own[memory_of(tensor), int(tensor.storage_offset())] = places * tensor.element_size()
    return sum(own.values())
