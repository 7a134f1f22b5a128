"""Holds the adapters that are loaded, side by side as graphs read them, and knows which row has which."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import RLock
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from ...engines import ADAPTER, OWNERS, Adapters, Bundle, Engine, RequestError
from ...engines.errors import counted
from .adapter_files import Read

NONE = 0  # the number of rows without an adapter


@dataclass(eq=False)
class Loaded:
    """An adapter that lies in the pool. Its memory is free again once it was unloaded and no request needs it."""

    name: str
    folder: Path
    number: int  # its columns begin at (number - 1) · rank
    digest: str  # of all that it is: what was computed with another must not be found by its requests
    users: "WeakSet[Any]" = field(default_factory=WeakSet)  # requests, which say whether they have finished

    @property
    def in_use(self) -> bool:
        return any(not one.finished for one in self.users)


@dataclass(eq=False)
class Held:
    """A hold on an adapter, as if by one request."""

    adapter: Loaded
    finished: bool = False


def rooms_of(bundle: Bundle) -> list[Adapters]:
    """Return the room that a bundle's target has for adapters, and that of its encoder."""
    found = (bundle.target, bundle.encoder)
    return [one.contract.adapters for one in found if one is not None and one.contract.adapters is not None]


class AdapterPool:
    """The memory of all adapters, made when the first is loaded. It stays in place, so that rounds may be recorded."""

    def __init__(self, rooms: Sequence[Adapters], engine: Engine, max_rows: int) -> None:
        """Make no memory yet, for the room of the target, which the engine runs, and that of its encoder if any."""
        self._target, self._engine, device = rooms[0].names, engine, engine.device
        self.room = room = replace(rooms[0], products=tuple(one for each in rooms for one in each.products))
        self.loaded: dict[str, Loaded] = {}
        self._leaving: list[Loaded] = []  # unloaded, but still in use
        self.dtype, self._device = getattr(torch, engine.contract.dtype), device
        self._rows = [NONE] * max_rows
        self._index = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._owners = torch.arange(1, room.most + 1, device=device).repeat_interleave(room.rank)
        self._matrices: dict[str, Tensor] = {}
        self._lock = RLock()  # requests are submitted, and adapters loaded, by any thread

    @property
    def held_bytes(self) -> int:
        return sum(one.nbytes for one in self._matrices.values())

    def require_new(self, name: str) -> None:
        if name in self.loaded:
            raise RequestError(f"there is an adapter {name!r} already; unload it first", "adapter")

    def load(self, name: str, folder: Path, read: Read) -> Loaded:
        """Put an adapter that was read into the pool; nothing changes if there is no room."""
        with self._lock:
            return self._load(name, folder, read)

    def _load(self, name: str, folder: Path, read: Read) -> Loaded:
        self.require_new(name)
        self._leaving = [one for one in self._leaving if one.in_use]
        taken = {one.number for one in (*self.loaded.values(), *self._leaving)}
        number = next((one for one in range(1, self.room.most + 1) if one not in taken), None)
        if number is None:
            waiting = f" ({len(self._leaving)} unloaded but still in use)" if self._leaving else ""
            raise RequestError(
                f"the room for {counted(self.room.most, 'adapter')} is taken{waiting}; unload one first", "adapter"
            )
        if not self._matrices:
            self._matrices = self._made()
        begin = (number - 1) * self.room.rank
        for product in self.room.products:
            pair = read.pairs.get(product.name, (None, None))
            for (key, _, parts), made in zip(product.matrices, pair, strict=True):
                own = self._matrices[key][begin : begin + self.room.rank].zero_()
                if made is not None:
                    self._engine.put(own[: len(made)], made, 1, parts)
        self.loaded[name] = loaded = Loaded(name, folder, number, read.digest)
        return loaded

    def _made(self) -> dict[str, Tensor]:
        """Make the memory of all matrices; of those of the target each device has its share."""
        columns, shards = self.room.most * self.room.rank, self._engine.contract.shards
        found = {}
        for name, width in self.room.widths(shards).items():
            memory = torch.zeros(columns, width, dtype=self.dtype, device=self._device)
            found[name] = self._engine.everywhere(memory) if name in self._target else memory
        return found

    def unload(self, name: str) -> None:
        """Take no more requests for an adapter; those that have it keep it to their end."""
        with self._lock:
            self._leaving.append(self.named(name))
            del self.loaded[name]

    def named(self, name: str) -> Loaded:
        with self._lock:
            if name not in self.loaded:
                known = ", ".join(self.loaded) or "none"
                raise RequestError(f"there is no adapter {name!r}; loaded are: {known}", "adapter")
            return self.loaded[name]

    def hold(self, name: str) -> Held:
        """Keep an adapter until the hold has finished."""
        with self._lock:
            held = Held(self.named(name))
            held.adapter.users.add(held)
            return held

    def join(self, request: Any, adapter: Loaded) -> None:
        """Keep an adapter for a request; refuse one that was unloaded since it was named, unless others keep it."""
        with self._lock:
            if not (adapter in self._leaving and adapter.in_use) and self.named(adapter.name) is not adapter:
                raise RequestError(f"adapter {adapter.name!r} was loaded anew; submit the request again", "adapter")
            adapter.users.add(request)

    def close(self) -> None:
        self._matrices = {}

    # Rows.

    def seat(self, row: int, adapter: Loaded | None) -> None:
        """Give a row the adapter of its new request."""
        self._note(row, NONE if adapter is None else adapter.number)

    def move(self, source: int, destination: int) -> None:
        self._note(destination, self._rows[source])

    def swap(self, one: int, other: int) -> None:
        ours, theirs = self._rows[one], self._rows[other]
        self._note(one, theirs)
        self._note(other, ours)

    def _note(self, row: int, number: int) -> None:
        if self._rows[row] != number:
            self._rows[row] = number
            self._index[row] = number

    # Calls.

    def columns(self, first: int, rows: int) -> int:
        """Return how many columns a call over these rows must read: a power of two of adapters, or all."""
        last = max(self._rows[first : first + rows], default=NONE)
        adapters = 1 << (last - 1).bit_length() if last else 0
        return min(adapters, self.room.most) * self.room.rank

    def inputs(self, first: int, rows: int) -> Mapping[str, Tensor]:
        """Return what a call over these rows is given; nothing if none of them has an adapter."""
        columns = self.columns(first, rows)
        if not columns:
            return {}
        given = {name: self._matrices[name][:columns] for name in self._target}
        return given | {ADAPTER: self._index[first : first + rows], OWNERS: self._owners[:columns]}

    def inputs_of(self, adapter: Loaded, room: Adapters) -> Mapping[str, Tensor]:
        """Return what a call over one row of an encoder is given, which has this adapter."""
        rank = self.room.rank
        own = slice((adapter.number - 1) * rank, adapter.number * rank)
        given = {name: self._matrices[name][own] for name in room.names}
        return given | {ADAPTER: self._owners[own][:1], OWNERS: self._owners[own]}
