"""Counts the bytes of the pictures that requests hold, which are many times those of their files."""

import threading
import weakref

from ...runtime.images.picture import Picture


class HeldPictures:
    """Pictures count from when they are added until nobody holds them any more."""

    def __init__(self) -> None:
        self.bytes = 0
        self._lock = threading.RLock()  # a picture may be forgotten wherever Python collects garbage

    def add(self, picture: Picture) -> None:
        size = sum(values.nbytes for values in picture.inputs.values())
        self._count(size)
        weakref.finalize(picture, self._count, -size)

    def _count(self, more: int) -> None:
        with self._lock:
            self.bytes += more
