"""Rewrite a graph by the rows of a table, one after the other."""

from collections.abc import Callable, Iterable

import onnx_ir as ir

Rewrite = Callable[[ir.Model], int]  # returns how often it fired


def rewritten(model: ir.Model, rewrites: Iterable[Rewrite]) -> dict[str, int]:
    """Rewrite a graph in place; return how often each rewrite fired, by its name."""
    fired: dict[str, int] = {}
    for rewrite in rewrites:
        fired[rewrite.__name__] = fired.get(rewrite.__name__, 0) + rewrite(model)
    return fired
