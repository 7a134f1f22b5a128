"""The values that a field of a body may have, for the sentence that refuses another."""

import re
from collections.abc import Iterator
from typing import Any

from msgspec import inspect


def choices(kind: type, path: str) -> list[str]:
    """Return the names that the field at a path such as `messages[0].role` may have; none where any text will do."""
    found = list(_plain(inspect.type_info(kind)))
    for step in re.findall(r"\[|\w+(?=[.\[]|$)", path):
        found = [deeper for one in found for deeper in _within(one, step)]
    return sorted({str(value) for one in found if isinstance(one, inspect.LiteralType) for value in one.values})


def _within(kind: inspect.Type, step: str) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.StructType):
        if kind.tag is not None and kind.tag_field == step:
            yield inspect.LiteralType((kind.tag,))
        for field in kind.fields:
            if field.encode_name == step:
                yield from _plain(field.type)
    elif isinstance(kind, inspect.ListType) and step == "[":
        yield from _plain(kind.item_type)


def _plain(kind: Any) -> Iterator[inspect.Type]:
    """Yield the types of a union, each without what only describes it."""
    if isinstance(kind, inspect.Metadata):
        yield from _plain(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from _plain(one)
    else:
        yield kind
