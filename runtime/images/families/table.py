"""The families of checkpoints whose images can be read, by the names that bundles keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from ..picture import Picture
from .gemma3 import Gemma3
from .idefics3 import Idefics3
from .llava import Llava
from .pixtral import Pixtral
from .qwen import Qwen

if TYPE_CHECKING:
    from PIL.Image import Image


class Family(Protocol):
    """Makes a picture of an image in the way of one family, by the settings of one checkpoint."""

    def read(self, image: Image) -> Picture: ...


FAMILIES: Mapping[str, Callable[..., Family]] = {
    "gemma3": Gemma3,
    "idefics3": Idefics3,
    "llava": Llava,
    "pixtral": Pixtral,
    "qwen": Qwen,
}
