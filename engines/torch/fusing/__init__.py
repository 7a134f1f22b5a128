"""Makes one operator of several before a graph is converted, by the rows of one table."""

from collections.abc import Callable
from dataclasses import dataclass

from . import (
    angles,
    attention,
    biases,
    entries,
    few_rows,
    gates,
    heads,
    narrow_products,
    norms,
    outputs,
    products,
    scales,
)
from .attention import reads_live
from .narrow_products import kept
from .outputs import PLACE
from .rewriting import Rewriting


@dataclass(frozen=True)
class Fusion:
    """How one operator is found in a graph; a row says how often it fired."""

    name: str
    fuse: Callable[[Rewriting], int]
    compiled: bool  # also before torch.compile, which fuses by itself what is computed element by element
    cpu: bool = True  # also there, where weights stay in their file and a launch costs little
    few: bool = False  # for steps of few rows of tokens alone


FUSIONS = (
    Fusion("heads", heads.fuse, compiled=True),
    Fusion("products", products.fuse, compiled=True, cpu=False),
    Fusion("narrow products", narrow_products.fuse, compiled=True, cpu=False),
    Fusion("biases", biases.fuse, compiled=False, cpu=False),  # whose sums begin with the bias
    Fusion("angles", angles.fuse, compiled=False, cpu=False),  # tables take memory, and a CPU few operations
    Fusion("norms", norms.fuse, compiled=False),
    Fusion("entries", entries.fuse, compiled=False),  # takes norms of heads along
    Fusion("attention", attention.fuse, compiled=True, cpu=False),  # where one mask serves all layers
    Fusion("scales", scales.fuse, compiled=False),
    Fusion("gates", gates.fuse, compiled=False),
    Fusion("outputs", outputs.fuse, compiled=False),
    Fusion("few rows", few_rows.fuse, compiled=False, cpu=False, few=True),
)


def fuse(graph: Rewriting, compiled: bool, as_on_gpu: bool, few: bool = False) -> dict[str, int]:
    """Rewrite a graph by the rows in their order, for all steps or then for those of `few` rows of tokens.

    Return how often each fired.
    """
    rows = [row for row in FUSIONS if (row.compiled or not compiled) and (row.cpu or as_on_gpu) and row.few == few]
    return {row.name: row.fuse(graph) for row in rows}


__all__ = ["FUSIONS", "PLACE", "Fusion", "Rewriting", "fuse", "kept", "reads_live"]
