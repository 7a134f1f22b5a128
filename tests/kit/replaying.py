"""CUDA graphs on a CPU: rounds are recorded, and replayed as a GPU replays them, by the addresses of their operations.

While a round is recorded nothing stays done. A replay repeats its operations on the very memory that they had. Memory
made inside a recording belongs to all records of a decoder: before each replay it is poisoned, as another record may
have written there. Memory made before must still be somebody else's, since a record keeps none alive: a replay refuses
to use what nobody owns any more.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from trt_spec.engines.torch import TorchEngine
from trt_spec.engines.torch import engine as torch_engine
from trt_spec.runtime.memory import bucket
from trt_spec.runtime.scheduling import capture
from trt_spec.runtime.state import place
from trt_spec.runtime.state.clock import Clock

Address = int  # of torch's record of a piece of memory


class View(NamedTuple):
    """A tensor that keeps no memory alive."""

    address: Address
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Operation(NamedTuple):
    function: Any
    leaves: list[Any]  # of its arguments, views in place of tensors
    spec: Any
    made: list[View]  # what it makes anew, in the order of its results


class Machine:
    """All memory that records have touched, and how they have been used."""

    def __init__(self) -> None:
        self.memory: dict[Address, torch.UntypedStorage] = {}
        self.pool: dict[Address, torch.dtype] = {}  # made inside recordings
        self.launched: list[int] = []  # how often each record was
        self.unread: set[int] = set()  # launched, their results not yet taken
        self.most_unread = 0

    def record(self, work: Callable[[Clock], Tensor], like: Tensor, pool: object, engines: object = ()) -> "Record":
        return Record(self, work, like)

    def view(self, tensor: Tensor) -> View:
        storage = tensor.untyped_storage()
        self.memory.setdefault(storage._cdata, storage)
        return View(storage._cdata, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())

    def tensor(self, view: View) -> Tensor:
        empty = torch.empty(0, dtype=view.dtype)
        return empty.set_(self.memory[view.address], view.offset, view.size, view.stride)

    def whole(self, address: Address, dtype: torch.dtype) -> Tensor:
        return torch.empty(0, dtype=dtype).set_(self.memory[address])

    def poison(self) -> None:
        for address, dtype in self.pool.items():
            self.whole(address, dtype).fill_(worst(dtype))

    def unowned(self, addresses: Sequence[Address]) -> list[Address]:
        """Return the addresses whose memory would be free by now on a GPU: only the machine itself holds it."""
        return [each for each in addresses if torch._C._storage_Use_Count(each) == 1]


def is_recording() -> bool:
    return any(isinstance(mode, Recording) for mode in _get_current_dispatch_mode_stack())


def worst(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max // 3


class Recording(TorchDispatchMode):
    """Runs operations and notes them, with what they write over."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.outside: dict[Address, torch.dtype] = {}  # memory that was there before
        self.numbers: list[Address] = []  # of these
        self.before: dict[Address, Tensor] = {}  # what was there before it was written over
        self._machine, self._own = machine, dict[Address, torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves, spec = tree_flatten((args, kwargs))
        views = [self._given(each) if isinstance(each, Tensor) else each for each in leaves]
        written = self._written(func, args, kwargs)
        for tensor in written:
            address = tensor.untyped_storage()._cdata
            if address not in self._own and address not in self.before:
                self.before[address] = self._machine.whole(address, torch.uint8).clone()
        found = func(*args, **kwargs)
        numbers = [each for each in tree_leaves(found) if not isinstance(each, Tensor | None)]
        assert not numbers, f"a round that is recorded reads a number on the host, by {func}"
        made = []
        known = {view.address for view in views if isinstance(view, View)}
        for each in tree_leaves(found):
            if isinstance(each, Tensor):
                address = each.untyped_storage()._cdata
                if address not in known:
                    assert address not in self._machine.pool or address in self._own, "a record holds what another made"
                    self._own[address] = each.dtype
                    made.append(self._machine.view(each))
                else:
                    made.append(None)
        if written or any(made):
            self.operations.append(Operation(func, views, spec, made))
        return found

    def _given(self, tensor: Tensor) -> View:
        view = self._machine.view(tensor)
        if view.address not in self._own:
            assert view.address not in self._machine.pool, "a record reads what was first made inside another recording"
            if view.address not in self.outside and not tensor.dim():
                self.numbers.append(view.address)
            self.outside.setdefault(view.address, view.dtype)
        return view

    def _written(self, func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        if not func._schema.is_mutable:
            return []
        found: list[Tensor] = []
        for place_, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = (
                    kwargs[argument.name] if argument.name in kwargs else args[place_] if place_ < len(args) else None
                )
                found += [each for each in tree_leaves(given) if isinstance(each, Tensor)]
        return found

    def undo(self) -> None:
        """Leave everything as it was before: a GPU only notes what it records."""
        for address, before in self.before.items():
            self._machine.whole(address, torch.uint8).copy_(before)
        self._machine.pool |= self._own
        self._machine.poison()


class Record:
    """What stands for one CUDA graph."""

    def __init__(self, machine: Machine, work: Callable[[Clock], Tensor], like: Tensor) -> None:
        self.clock = Clock(like.device)
        self._machine, self._index = machine, len(machine.launched)
        machine.launched.append(0)
        recording = Recording(machine)
        with recording:
            found = work(self.clock)
        self._found = machine.view(found)
        del found
        recording.undo()
        numbers = set(machine.unowned(recording.numbers))  # of the host, which a GPU takes as arguments of kernels
        self._operations, self._outside = recording.operations, [e for e in recording.outside if e not in numbers]
        self._result = torch.empty_like(like)

    def launch(self) -> None:
        machine = self._machine
        machine.launched[self._index] += 1
        machine.unread.add(self._index)
        machine.most_unread = max(machine.most_unread, len(machine.unread))
        lost = machine.unowned(self._outside)
        assert not lost, (
            f"a replay uses memory of {[machine.memory[each].nbytes() for each in lost]} bytes that nobody owns"
        )
        machine.poison()
        for one in self._operations:
            args, kwargs = tree_unflatten(
                [machine.tensor(e) if isinstance(e, View) else e for e in one.leaves], one.spec
            )
            found = one.function(*args, **kwargs)
            for view, each in zip(one.made, (e for e in tree_leaves(found) if isinstance(e, Tensor)), strict=True):
                if view is not None:
                    machine.tensor(view).copy_(each)
        self._result.copy_(machine.tensor(self._found))

    def table(self) -> Tensor:
        self._machine.unread.discard(self._index)
        return self._result


CONVERTED: dict[Any, Any] = {}  # graphs, by their files and shapes: to convert them takes longer than what is tested


def converted_once() -> Iterator[Any]:
    """Let engines over one file convert it for each shape once."""
    open_, convert = TorchEngine.__init__, TorchEngine._convert

    def opened(self: TorchEngine, graph: Path, *rest: Any, **options: Any) -> None:
        vars(self)["file"] = graph
        open_(self, graph, *rest, **options)

    def converted(self: TorchEngine, shape: Any) -> Any:
        key = vars(self)["file"], self._with_kernels, shape
        if key not in CONVERTED:
            CONVERTED[key] = convert(self, shape)
        return CONVERTED[key]

    yield patch.object(TorchEngine, "__init__", opened)
    yield patch.object(TorchEngine, "_convert", converted)


@contextmanager
def replaying(*, kernels: bool = True) -> Iterator[Machine]:
    """Let the engine `torch` be used as on a GPU: static memory, fused operators, records, rounds ahead.

    Without `kernels` steps read the first 16, 32, 64, … entries of the cache, as they do where nothing is fused.
    """
    machine, always = Machine(), property(lambda self: True, lambda self, value: None)
    with ExitStack() as patched:
        for change in (
            patch.object(capture, "Record", machine.record),
            patch.object(capture, "new_pool", lambda: "pool"),
            patch.object(TorchEngine, "capturable", lambda self: True),
            patch.object(TorchEngine, "static_capacity", always, create=True),
            patch.object(TorchEngine, "reads_prefixes", always, create=True),
            patch.object(bucket, "SHORTEST", 16),
            patch.object(place, "HOSTS", set()),
            patch.object(torch_engine, "WITH_KERNELS", ("cpu",) if kernels else ()),
            *converted_once(),
        ):
            patched.enter_context(change)
        yield machine
