"""Where memory lies: on one device, or on each of those that an engine runs on."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ...engines import Engine, Part


class Placing(Protocol):
    """The part of an engine that memory is made with."""

    def everywhere(self, memory: Tensor) -> Tensor:
        """Let all devices have memory like this."""

    def put(self, memory: Tensor, numbers: Tensor, axis: int = 0, parts: Sequence[Part] = ()) -> None:
        """Write to it, each device its share of an axis in parts."""


HERE: Placing = Engine()  # on one device alone
