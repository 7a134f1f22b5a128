"""The keys that let clients in: those of flags, and those of a file, which can be read again while the server runs."""

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from ...engines import RequestError
from ..text_files import read_text

COMMENT = "#"


class Keys:
    """None at all let everybody in."""

    def __init__(self, given: Sequence[str] = (), file: Path | None = None) -> None:
        self._given, self._file = given, file
        self._keys = self._read()

    def __bool__(self) -> bool:
        return bool(self._keys)

    def read_again(self) -> None:
        """Take the keys that the file has now; where it cannot be used, they stay as they were."""
        self._keys = self._read()

    def caller(self, given: bytes) -> str | None:
        """Return the name that whoever gives this key has here; None if it is not one of ours."""
        # Each key is compared in constant time, and all of them are.
        fits = [hmac.compare_digest(given, key) for key in self._keys]
        return hashlib.sha256(given).hexdigest() if any(fits) else None

    def _read(self) -> list[bytes]:
        keys = [*self._given, *(() if self._file is None else read_keys(self._file))]
        for key in keys:
            if not key.strip():
                raise RequestError(
                    "an API key is empty, and would let in whoever sends none; give one with signs, or none at all"
                )
        return [key.strip().encode() for key in keys]


def read_keys(file: Path) -> list[str]:
    """Read a key from each line; empty lines and those that begin with # are none."""
    lines = [line.strip() for line in read_text(file, "--api-key-file").removeprefix("\ufeff").splitlines()]
    keys = [line for line in lines if line and not line.startswith(COMMENT)]
    if not keys:
        raise RequestError(f"{file} holds no key; put one on each line, or leave --api-key-file out")
    return keys
