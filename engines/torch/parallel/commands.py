"""What the leading process tells the others, as JSON over a socket: never code, and nothing that is unpickled."""

import json
import select
import socket
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import EngineError

LENGTH = 8  # bytes that say how long a message is
Command = list[Any]  # its name, then its arguments

MAKE, COMPUTE, SHARE, FORGET = "make", "compute", "share", "forget"  # memory that all shards have
STEP, RUN, DROP = "step", "run", "drop"  # steps over it
RECORD, RECORDED, REPLAY = "record", "recorded", "replay"  # rounds as CUDA graphs
END = "end"


class Closed(EngineError):
    """The other side has gone."""


class Line:
    """A socket to one other process."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection

    def send(self, commands: Sequence[Command]) -> None:
        message = json.dumps(commands).encode()
        self.say(len(message).to_bytes(LENGTH, "little") + message)

    def say(self, message: bytes) -> None:
        try:
            self._socket.sendall(message)
        except OSError as error:
            raise Closed(f"a shard's process has gone ({error})") from error

    def receive(self) -> list[Command]:
        commands: list[Command] = json.loads(self.take(int.from_bytes(self.take(LENGTH), "little")))
        return commands

    def take(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            try:
                some = self._socket.recv(size - len(found))
            except OSError as error:
                raise Closed(f"a shard's process has gone ({error})") from error
            if not some:
                raise Closed("a shard's process has gone")
            found += some
        return bytes(found)

    @property
    def gone(self) -> bool:
        """Whether the other side has gone; it says nothing unasked."""
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN)
        except ValueError:  # this side has closed it
            return True
        return bool(poll.poll(0))

    def require(self) -> None:
        if self.gone:
            raise Closed("a shard's process has gone")

    def wait_forever(self) -> None:
        """Let `receive` wait however long nothing is said."""
        self._socket.settimeout(None)

    def close(self) -> None:
        self._socket.close()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Packed:
    """The numbers of several tensors in one memory, which one broadcast gives to all shards, bit for bit."""

    def __init__(self, tensors: Sequence[Tensor], device: str) -> None:
        self._tensors = tensors
        self.whole = torch.zeros(sum(one.numel() for one in tensors), dtype=torch.int64, device=device)
        pieces = torch.split(self.whole, [one.numel() for one in tensors])
        self._pieces = [
            piece.view(torch.float64 if one.is_floating_point() else torch.int64).view(one.shape)
            for piece, one in zip(pieces, tensors, strict=True)
        ]

    def pack(self) -> None:
        for piece, one in zip(self._pieces, self._tensors, strict=True):
            piece.copy_(one)

    def unpack(self) -> None:
        for piece, one in zip(self._pieces, self._tensors, strict=True):
            one.copy_(piece)
