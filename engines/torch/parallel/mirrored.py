"""Memory that every shard has: what is done to it here is done by all.

Shards of a model keep states of one shape, each those of its own heads, and every operation on such memory is the same
for all. So whoever moves entries of a cache need not know that there are several devices.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor

from ...contract import Part, own_share
from .commands import COMPUTE, FORGET, MAKE, SHARE, Command, dtype_name

# Kinds of arguments.
MEMORY, GIVEN, SIZES, DTYPE, NAMED, DEVICE = "memory", "given", "sizes", "dtype", "named", "device"
ATEN = "aten"
_numbers = count()  # of memory; never used twice in a process


class Leader(Protocol):
    def tell(self, command: Command) -> None:
        """Let all other shards do something, at the latest when they next have to work together."""

    def give(self, command: Command, tensors: Sequence[Tensor]) -> None:
        """Let all other shards do something for which they need these tensors' numbers."""


class Mirrored(Tensor):
    """The first shard's part of memory that all shards have."""

    local: Tensor
    number: int
    _leader: Leader

    @staticmethod
    def __new__(cls, local: Tensor, leader: Leader) -> "Mirrored":
        with torch.inference_mode(False):  # torch counts the versions of those that views are made of
            made: Mirrored = Tensor._make_wrapper_subclass(
                cls,
                local.size(),
                strides=local.stride(),
                storage_offset=local.storage_offset(),
                dtype=local.dtype,
                device=local.device,
            )
        made.local, made._leader, made.number = local, leader, next(_numbers)
        weakref.finalize(made, leader.tell, [FORGET, made.number])
        return made

    def __init__(self, *_: object) -> None:
        """Torch asks for none."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Mirrored({self.local!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        found = func(*_local(args), **_local(kwargs))
        written = _written(func, args, kwargs)
        if not all(isinstance(one, Mirrored) for one in written):
            return written[0] if len(written) == 1 else tuple(written)  # what is read here stays here
        if not _tensors(found):
            return found  # a number
        leader = next(one for one in _tensors((args, kwargs)) if isinstance(one, Mirrored))._leader
        given: list[Tensor] = []
        fresh = [] if written else [Mirrored(one, leader) for one in _tensors(found)]
        made, numbers = [*written, *fresh], [one.number for one in fresh]
        command = [COMPUTE, str(func), encoded(args, given), encoded(kwargs, given), numbers]
        if given:
            leader.give(command, given)
        else:
            leader.tell(command)
        return made[0] if isinstance(found, Tensor) else tuple(made)


def mirrored(local: Tensor, leader: Leader) -> Mirrored:
    """Let all shards have memory like this, all of it zero."""
    made = Mirrored(local, leader)
    leader.tell([MAKE, made.number, list(local.shape), dtype_name(local.dtype)])
    return made


def share_out(memory: Tensor, numbers: Tensor, axis: int, parts: Sequence[Part], shards: int) -> None:
    """Write numbers to memory, of which each shard has its share of these parts of an axis; all without parts."""
    if not parts or not isinstance(memory, Mirrored):
        memory.copy_(numbers)
        return
    memory.local.copy_(own_share(numbers, axis, parts, 0, shards))
    sizes = [[part.size, part.units] for part in parts]
    given = list(numbers.shape), dtype_name(numbers.dtype)
    memory._leader.give([SHARE, memory.number, axis, sizes, shards, *given], [numbers])


def take_share(command: Command, memory: Mapping[int, Tensor], take: Callable[..., Tensor], rank: int) -> None:
    """Write this shard's share of what the leader gives."""
    _, number, axis, sizes, shards, shape, dtype = command
    numbers, parts = take(shape, getattr(torch, dtype)), [Part(*each) for each in sizes]
    memory[number].copy_(own_share(numbers, axis, parts, rank, shards))


def local(tensor: Tensor) -> Tensor:
    return tensor.local if isinstance(tensor, Mirrored) else tensor


def _local(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_local(one) for one in value)
    if isinstance(value, dict):
        return {name: _local(one) for name, one in value.items()}
    return value.local if isinstance(value, Mirrored) else value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [each for one in value for each in _tensors(one)] if isinstance(value, list | tuple) else []


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the arguments that an operation writes to."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += _tensors(args[place] if place < len(args) else kwargs.get(argument.name))
    return found


def encoded(value: Any, given: list[Tensor]) -> Any:
    """Return an argument as JSON has it; tensors that only this process has are appended to `given`."""
    if isinstance(value, Mirrored):
        return {MEMORY: value.number}
    if isinstance(value, Tensor):
        given.append(value)
        return {GIVEN: [list(value.shape), dtype_name(value.dtype)]}
    if isinstance(value, list | tuple):
        return [encoded(one, given) for one in value]
    if isinstance(value, dict):
        return {"of": {name: encoded(one, given) for name, one in value.items()}}
    if isinstance(value, torch.dtype):
        return {DTYPE: dtype_name(value)}
    if isinstance(value, torch.layout | torch.memory_format):
        return {NAMED: str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {DEVICE: ""}
    assert value is None or isinstance(value, bool | int | float | str), value
    return value


def decoded(
    value: Any, memory: Mapping[int, Tensor], take: Callable[[Sequence[int], torch.dtype], Tensor], device: str
) -> Any:
    """Return an argument that `encoded` made; `take` receives a tensor that the leader gives."""
    if isinstance(value, list):
        return [decoded(one, memory, take, device) for one in value]
    if not isinstance(value, dict):
        return value
    [(kind, found)] = value.items()
    if kind == MEMORY:
        return memory[found]
    if kind == GIVEN:
        return take(found[0], getattr(torch, found[1]))
    if kind == DEVICE:
        return torch.device(device)
    if kind in (DTYPE, NAMED):
        return getattr(torch, found)
    return {name: decoded(one, memory, take, device) for name, one in found.items()}


def compute(command: Command, memory: dict[int, Tensor], take: Callable[..., Tensor], device: str) -> None:
    """Do what the leader did, on this shard's memory."""
    _, name, args, kwargs, numbers = command
    namespace, operator, overload = name.split(".")
    assert namespace == ATEN, name
    function = getattr(getattr(torch.ops.aten, operator), overload)
    given = decoded(args, memory, take, device)
    found = function(*given, **decoded(kwargs, memory, take, device))
    memory.update(zip(numbers, _tensors(found), strict=False))  # none of what it wrote to
