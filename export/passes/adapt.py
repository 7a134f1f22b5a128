"""Give a written graph room for adapters: beside each product of its layers the two narrow ones of every row's own.

All adapters lie side by side as columns of one memory. A row keeps the columns that are its adapter's, so that a batch
may mix adapters in one call, and a row without one adds zeros to what the product gives.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import nn
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from ...engines import ADAPTER, OWNERS, Adapters, ExportError, Part, Product
from ...engines.bundle import ADAPTED, FUSED, GRAPH
from .merge_projections import MERGED
from .nodes import Nodes, constant

PLAIN = (nn.Linear.forward, FalconLinear.forward)  # others are routers
WIDER = (ir.DataType.FLOAT, ir.DataType.DOUBLE)  # in which some products of a narrow graph are, and terms of exact sums
# Its module, and what rewrites and exact sums have added.
MATRIX = re.compile(r"(.+)\.weight(\.T)?(\.wide)?(\.rounded)?(\.float32)?(\.wide\.\d.+)?")


def linear_modules(model: Any) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of each linear layer, by its name; not of the one that gives the logits.

    Where layers have one matrix together, the graph does not say which of them runs, and adapters are of one.
    """
    found, matrices, last = {}, dict[str, torch.Tensor](), model.get_output_embeddings()
    for name, module in model.named_modules():
        if module is last:
            continue
        if isinstance(module, nn.Linear) and type(module).forward in PLAIN:
            found[name], matrices[name] = (module.in_features, module.out_features), module.weight
        elif isinstance(module, Conv1D):
            found[name], matrices[name] = (module.nx, module.nf), module.weight
    users = Counter(map(id, matrices.values()))
    return {name: sizes for name, sizes in found.items() if users[id(matrices[name])] == 1}


def adaptable(model: ir.Model, modules: Mapping[str, tuple[int, int]]) -> tuple[Product, ...]:
    """Return the products that can have adapters: with matrices of those modules, each by inputs and outputs."""
    names = [name for node in model.graph for name in _modules(node) if name in modules]
    twice = {name for name in names if names.count(name) > 1}
    found = tuple(Product(name, *modules[name]) for name in names if name not in twice)
    if not found:
        raise ExportError("the model has no linear layer that adapters could be beside; export it without --adapters")
    return found


def spread(model: ir.Model, adapters: Adapters, parts_of: Callable[[ir.Value], tuple[Part, ...]]) -> Adapters:
    """Return the adapters of a graph in shards: their matrices are in the parts of what products read and give.

    Columns of products that are merged are one after another in the parts of what the whole gives.
    """
    known, found = {one.name: one for one in adapters.products}, list[Product]()
    for node in model.graph:
        modules = _modules(node)
        given = iter(parts_of(node.outputs[0]) if modules else ())
        for name, columns in modules.items():
            read = node.inputs[0]
            assert read is not None
            own, size = list[Part](), known[name].outputs if name in known else columns
            while (left := size - sum(part.size for part in own)) > 0 and (part := next(given, None)) is not None:
                own.append(part)
            if own and left:
                raise ExportError(f"the columns of {name} lie across parts of shards; please report it")
            if name in known:
                found.append(replace(known[name], input_parts=parts_of(read), output_parts=tuple(own)))
    return replace(adapters, products=tuple(found))


def adapt(model: ir.Model, adapters: Adapters, shards: int = 1) -> int:
    """Add the adapters to a graph, or to one of its shards; returns beside how many products."""
    graph, products = model.graph, {one.name: one for one in adapters.products}
    places = [node for node in graph if any(name in products for name in _modules(node))]
    if missing := products.keys() - {name for node in places for name in _modules(node)}:
        raise ExportError(f"the graph has no product {min(missing)} to adapt; please report it")
    read = [
        value.dtype for node in places for value in node.inputs[:1] if value is not None and value.dtype is not None
    ]
    dtype = next((one for one in read if one not in WIDER), ir.DataType.FLOAT)
    given = {
        spec.name: ir.Value(
            name=spec.name,
            shape=ir.Shape(spec.shape),
            type=ir.TensorType(ir.DataType.INT64 if spec.dtype == "int64" else dtype),
        )
        for spec in adapters.inputs("float32", shards)
    }
    graph.inputs.extend(given.values())
    op = Nodes(graph)
    first = op("Unsqueeze", given[ADAPTER], op.stored([1]))
    own = op("Equal", first, op("Unsqueeze", given[OWNERS], op.stored([0])))
    nothing = {  # others' columns may be infinite
        each: constant(graph, f"adapters.nothing.{each.name}", torch.zeros(()), each)
        for each in dict.fromkeys((dtype, *read))
    }
    of_rows = op("Unsqueeze", own, op.stored([1]))  # [B, 1, columns]
    tokens = op("Concat", op("Shape", graph.inputs[0], end=2), op.stored([1]), axis=0)  # of sound there is more
    size = op("Concat", op.stored([-1]), op("Shape", given[OWNERS]), axis=0)
    of_tokens = op("Reshape", op("Expand", of_rows, tokens), size)  # [B · S, columns], where rows lie one after another
    shares = {3: of_rows, 2: of_tokens}
    made = list(op.made)
    graph.insert_before(graph[0], made)
    for node in places:
        hidden, place = node.inputs[0], node.outputs[0]
        assert hidden is not None
        # Before the bias, which engines add within what comes next.
        rank = next((len(value.shape) for value in (place, hidden) if value.shape is not None), 0)
        if rank not in shares:
            raise ExportError(f"{node.name} gives {place.name} of the shape {place.shape}; please report it")
        op, kind = Nodes(graph), hidden.dtype or dtype
        parts = []
        for name, columns in _modules(node).items():
            if name in products:
                down, up = given[products[name].down], given[products[name].up]
                if kind != dtype:
                    down, up = (op("Cast", each, to=int(kind)) for each in (down, up))
                narrow = op("MatMul", hidden, op("Transpose", down, perm=[1, 0]))
                narrow = op("Where", shares[rank], narrow, nothing[kind])
                parts.append(op("MatMul", narrow, up))
            else:  # of a draft that asks keys of the same source
                rows = op("Concat", op("Shape", hidden, end=-1), op.stored([columns]), axis=0)
                parts.append(op("Expand", nothing[kind], rows))
        added = parts[0] if len(parts) == 1 else op("Concat", *parts, axis=-1)
        users = list(place.uses())
        whole = op("Add", place, added)
        whole.shape, whole.type = place.shape, place.type
        graph.insert_after(node, op.made)
        made += op.made
        for use in users:
            use.node.replace_input_with(use.idx, whole)
    for number, node in enumerate(made):  # else they get names that parts of an If may have
        node.outputs[0].name = f"adapters.{number}"
    return len(places)


def write_adapted(folder: Path, adapters: Adapters, shards: int = 1) -> int:
    """Write beside each graph of a folder one with room for adapters, over the same weights; return of how many.

    The graph may be one of several shards.
    """
    found = 0
    for name in (GRAPH, FUSED):
        if (folder / name).exists():
            graph = ir.load(folder / name)
            found = adapt(graph, adapters, shards)
            ir.save(graph, folder / f"{ADAPTED}{name}")
    return found


def _modules(node: ir.Node) -> dict[str, int]:
    """Return the modules of a product, and the columns of each of several whose matrices were merged."""
    if node.op_type not in ("MatMul", "Gemm") or node.inputs[1] is None:
        return {}
    names = str(node.metadata_props.get(MERGED, f"{node.inputs[1].name} 0")).split(" ")
    each = ((MATRIX.fullmatch(name), int(columns)) for name, columns in zip(names[::2], names[1::2], strict=True))
    return {found[1]: columns for found, columns in each if found is not None}
