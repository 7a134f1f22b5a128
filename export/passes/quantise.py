"""Store the matrices of a graph in blocks of small numbers with a scale each: standard block-wise DequantizeLinear.

ONNX Runtime fuses `DequantizeLinear → MatMul` of integers to its MatMulNBits; TensorRT compiles it as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import onnx_ir as ir
import torch
from torch import Tensor

from ...engines import ExportError
from . import nvfp4
from .blocks import Blocks
from .blocks_in import blocks_in
from .nodes import constant
from .shifts import add_shifts, shifted

AUTO = "auto"  # until the checkpoint is known
KINDS = (AUTO, "none", "int8", "int4", "fp8", "nvfp4")
FLOATS = ("fp8", "nvfp4")  # of which no engine looks rows up
STORED = {
    "int8": ir.DataType.INT8,
    "int4": ir.DataType.INT4,
    "fp8": ir.DataType.FLOAT8E4M3FN,
    "nvfp4": ir.DataType.FLOAT4E2M1,
}
LARGEST_FP8 = 448
BLOCK = {"int8": 128, "int4": 32, "nvfp4": nvfp4.BLOCK}  # rows of a matrix that share a scale
SMALLEST_BLOCK = 16  # what engines have kernels for
INT4_SCALES = (1.0, 0.95, 0.9, 0.85, 0.8)  # shares of the largest value that becomes -8; the best by squared error


@dataclass(frozen=True)
class Quantisation:
    """How the weights of one model are stored; the vocabulary projection and the embedding may stay as they are.

    Where the two are one matrix, what is asked for either holds for both.
    """

    kind: str = "none"
    wide_head: bool = False
    wide_embedding: bool = False
    as_stored: bool = False  # take the blocks that the matrices are made of, and leave the others wide

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ExportError(f"weights are {self.kind!r}, expected {', '.join(KINDS)}")

    def unless_stored(self) -> "Quantisation":
        """Return what `auto` is for what no file holds in blocks."""
        return replace(self, kind="none") if self.kind == AUTO else self


Known = Callable[[str, str, torch.dtype], Blocks | None]  # by name, kind, and the type of scales


def nothing_known(name: str, kind: str, dtype: torch.dtype) -> Blocks | None:
    return None


def quantise(model: ir.Model, how: Quantisation, known: Known = nothing_known) -> int:
    """Quantise linear layers and the embedding; returns how many.

    The checkpoint's own tensors, of which the graph's are views, are overwritten with their rounded values, so that
    the loaded model stays the reference of the graph. What is known in blocks already is taken so.
    """
    if how.kind == "none":
        return 0
    graph = model.graph
    head, lookup = _head(graph), _lookup(graph)
    tied = head is not None and lookup is not None and _raw(head).data_ptr() == _raw(_table(lookup)).data_ptr()
    wide_embedding = how.wide_embedding or how.kind in FLOATS
    wide_head = how.wide_head or (tied and wide_embedding)
    wide_embedding = wide_embedding or (tied and how.wide_head)
    head_blocks: Blocks | None = None
    fired = 0
    for node in list(graph):
        weight = node.inputs[1] if node.op_type == "MatMul" else None
        if weight is None or not _is_matrix(graph, weight) or (weight is head and wide_head):
            continue
        raw = _raw(weight)
        name = str(weight.name).removesuffix(".T")
        blocks = blocks_in(raw) if how.as_stored else known(name, how.kind, raw.dtype)
        if blocks is None and how.as_stored:
            continue
        if blocks is None:
            block = _block(raw.shape[0], how.kind)
            if not block:
                continue
            blocks = to_blocks(raw, how.kind, block)
        raw.copy_(blocks.matrix())
        if weight is head:
            head_blocks = blocks
        _read_blocks(graph, weight, blocks, _narrowest(blocks) if how.as_stored else how.kind)
        fired += 1
    if lookup is not None and not wide_embedding:
        fired += _quantise_embedding(graph, lookup, head_blocks if tied else None, how.as_stored)
    return fired


def to_blocks(matrix: Tensor, kind: str, block: int) -> Blocks:
    """Round `[K, N]` to the nearest multiples of one scale for each block of rows and column."""
    wide = matrix.detach().float().reshape(-1, block, matrix.shape[1])  # [K / block, block, N]
    if kind == "fp8":
        scales = _as_stored(wide.abs().amax(1) / LARGEST_FP8, matrix.dtype)
        numbers = (wide / scales[:, None]).clamp_(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
        return Blocks(numbers.view(matrix.shape), scales, block)
    if kind == "int8":
        scales = _as_stored(wide.abs().amax(1) / 127, matrix.dtype)
        integers = _round(wide, scales, 127, 127)
        return Blocks(integers.view(matrix.shape), scales, block)
    if kind == "nvfp4":
        numbers, parts, whole = nvfp4.to_nvfp4(wide, matrix.dtype)
        scales = nvfp4.widened(parts, whole, matrix.dtype)
        return Blocks(numbers.view(matrix.shape), scales, block, made_of=(parts, whole))
    largest = wide.gather(1, wide.abs().argmax(1, keepdim=True))[:, 0] / -8  # it becomes -8, whatever its sign
    largest = _as_stored(largest, matrix.dtype)
    best, error = largest, torch.full_like(largest, torch.inf)
    for share in INT4_SCALES:
        scales = _as_stored(largest * share, matrix.dtype)
        missed = (_round(wide, scales, 8, 7) * scales[:, None] - wide).square_().sum(1)
        best, error = torch.where(missed < error, scales, best), torch.minimum(missed, error)
    return Blocks(_round(wide, best, 8, 7).view(matrix.shape), best, block)


def _as_stored(scales: Tensor, stored: torch.dtype) -> Tensor:
    """Round scales as they will be stored. Zeros, as of pruned blocks, become any other: TensorRT refuses zero."""
    scales = scales.to(stored).float()
    return torch.where(scales == 0, torch.ones_like(scales), scales)


def _round(wide: Tensor, scales: Tensor, lowest: int, highest: int) -> Tensor:
    return (wide / scales[:, None]).round_().clamp_(-lowest, highest).to(torch.int8)


def _block(rows: int, kind: str) -> int:
    """Choose the largest block that divides the rows; 0 if only smaller ones than any kernel takes do."""
    if kind == "fp8":  # a scale for the whole column: TensorRT stores any other matrix of FP8 widened
        return rows
    block = BLOCK[kind]
    while rows % block:
        block //= 2
    return block if block >= SMALLEST_BLOCK else 0


def _narrowest(blocks: Blocks) -> str:
    lowest, highest = blocks.numbers.aminmax()
    return "int4" if lowest >= -8 and highest <= 7 else "int8"


def _head(graph: ir.Graph) -> ir.Value | None:
    """Find the matrix of the vocabulary projection: it is in the last product before the logits."""
    value: ir.Value | None = graph.outputs[0]
    while value is not None and (node := value.producer()) is not None:
        if node.op_type == "MatMul":
            return node.inputs[1]
        value = node.inputs[0]
    return None


def _is_matrix(graph: ir.Graph, value: ir.Value) -> bool:
    return value.name in graph.initializers and value.shape is not None and len(value.shape) == 2


def _raw(weight: ir.Value) -> Tensor:
    raw = getattr(weight.const_value, "raw", None)
    assert isinstance(raw, torch.Tensor), f"{weight.name} is not backed by the checkpoint"
    return raw.detach()


def _read_blocks(graph: ir.Graph, weight: ir.Value, blocks: Blocks, kind: str) -> None:
    """Put a `DequantizeLinear` in the place of a matrix, after another if its scales are made by one."""
    name, nodes = str(weight.name), list[ir.Node]()
    whole = kind == "fp8" and len(blocks.scales) == 1
    stored = [constant(graph, f"{name}.{kind}", blocks.numbers, STORED[kind])]
    if blocks.made_of is None:
        scales = blocks.scales[0] if whole else blocks.scales
        stored.append(constant(graph, f"{name}.scales", scales, weight.dtype))
    else:
        parts, factor = blocks.made_of
        made = [constant(graph, f"{name}.scales", parts, STORED["fp8"])]
        made.append(constant(graph, f"{name}.scale", factor, weight.dtype))
        nodes.append(_dequantize(f"{name}.scales", weight, made))
        stored.append(nodes[0].outputs[0])
    if blocks.zeros is not None:
        stored.append(constant(graph, f"{name}.zeros", blocks.zeros, STORED[kind]))
    places = {"axis": 1} if whole else {"axis": 0, "block_size": blocks.block}
    nodes.append(_dequantize(name, weight, stored, places))
    graph.insert_before(graph[0], nodes)
    products = [use.node for use in weight.uses()]
    weight.replace_all_uses_with(nodes[-1].outputs[0])
    del graph.initializers[name]
    if blocks.shifts is not None:
        shifts = constant(graph, f"{name}.shifts", blocks.shifts, weight.dtype)
        for product in products:
            add_shifts(graph, product, shifts, blocks.block)


def _dequantize(name: str, weight: ir.Value, stored: list[ir.Value], places: dict[str, int] | None = None) -> ir.Node:
    """Widen small numbers to the type of a weight."""
    node = ir.node("DequantizeLinear", stored, places)
    output = node.outputs[0]
    output.name, output.shape, output.type = f"{name}.wide", stored[0].shape, weight.type
    return node


def _lookup(graph: ir.Graph) -> ir.Node | None:
    """Find the node that looks token ids up, in a table with a row for each logit."""
    shape = graph.outputs[0].shape
    if shape is None or len(shape) != 3:  # one that sees gives no logits
        return None
    vocab_size = shape[2]
    for node in graph:
        table = node.inputs[0] if node.op_type == "Gather" else None
        if table is not None and _is_matrix(graph, table) and _raw(table).shape[0] == vocab_size:
            return node
    return None


def _table(lookup: ir.Node) -> ir.Value:
    table = lookup.inputs[0]
    assert table is not None
    return table


def _quantise_embedding(graph: ir.Graph, lookup: ir.Node, head: Blocks | None, as_stored: bool) -> int:
    """Look up int8 rows and their scales, and widen only those; a tied embedding takes its head's numbers over."""
    table = _table(lookup)
    raw = _raw(table)
    block = _block(raw.shape[1], "int8")
    if head is None and as_stored:
        head = blocks_in(raw.T)
    if head is None and (as_stored or not block):
        return 0
    blocks = to_blocks(raw.T, "int8", block) if head is None else head
    raw.copy_(blocks.matrix().T)
    rows = _looked_up(graph, lookup, f"{table.name}.int8", blocks.numbers.T, ir.DataType.INT8)
    scales = _looked_up(graph, lookup, f"{table.name}.scales", blocks.scales.T, table.dtype)
    found = lookup.outputs[0]
    users = list(found.uses())
    zeros = () if blocks.zeros is None else (blocks.zeros.T,)
    stored = [_looked_up(graph, lookup, f"{table.name}.zeros", each, ir.DataType.INT8) for each in zeros]
    widen = ir.node("DequantizeLinear", [rows, scales, *stored], {"axis": 2, "block_size": blocks.block})
    wide = widen.outputs[0]
    wide.name, wide.shape, wide.type = f"{found.name}.wide", found.shape, found.type
    graph.insert_after(lookup, [widen])
    if blocks.shifts is not None:
        shifts = _looked_up(graph, lookup, f"{table.name}.shifts", blocks.shifts.T, table.dtype)
        wide = shifted(graph, widen, shifts, blocks.block)
    for use in users:
        use.node.replace_input_with(use.idx, wide)
    graph.remove(lookup, safe=True)
    if not table.uses():
        del graph.initializers[str(table.name)]
    return 1


def _looked_up(graph: ir.Graph, lookup: ir.Node, name: str, table: Tensor, dtype: ir.DataType | None) -> ir.Value:
    """Look the same ids up in another table."""
    value = constant(graph, name, table, dtype)
    node = ir.node("Gather", [value, lookup.inputs[1]], {"axis": 0})
    output = node.outputs[0]
    output.name, output.type = f"{name}.rows", value.type
    graph.insert_before(lookup, [node])
    return output
