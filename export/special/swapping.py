"""Let an object have other attributes while it is traced."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def swapped(owner: Any, **others: Any) -> Iterator[None]:
    """Give a class, a module or an object these attributes in place of its own until the block ends."""
    before = {name: getattr(owner, name) for name in others}
    for name, other in others.items():
        setattr(owner, name, other)
    try:
        yield
    finally:
        for name, own in before.items():
            setattr(owner, name, own)
