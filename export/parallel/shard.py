"""One shard of a graph: what it computes of each value, and the part of each constant that it keeps."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from ...engines import Contract
from .found import Cut, Found, total_of
from .spread import Spread
from .walk import LOGITS

DOMAIN = "trt_spec"  # of the operators that are between shards


class Shard:
    """Makes one shard of a graph, whose constants are still whole."""

    def __init__(self, model: ir.Model, contract: Contract, found: Found, rank: int, shards: int, exact: bool) -> None:
        self._exact = exact
        self._model, self._graph, self._contract, self._found = model, model.graph, contract, found
        self._rank, self._shards = rank, shards
        self._values = {str(value.name): value for node in self._graph for value in node.outputs}
        self._values |= {str(value.name): value for value in self._graph.inputs}

    def apply(self) -> None:
        for name in self._found.means:
            self._mean(name)
        for name in dict.fromkeys(self._found.sums):
            self._sum(name)
        for name, size in self._found.norms.items():
            self._norm(name, size)
        if self._shards > 1:
            self._share_out()
        self._name_outputs()

    def _share_out(self) -> None:
        """Leave this shard its own part of all that is cut."""
        self._model.opset_imports[DOMAIN] = 1
        for node in list(self._graph):
            self._change(node)
        spread = self._found.spreads.get(LOGITS)
        if spread is not None:
            self._gather_logits(spread)
        for name, cut in self._found.cuts.items():
            _keep(self._graph.initializers[name], cut, self._rank, self._shards)
        if self._rank:
            for name in self._found.alone:
                value = self._graph.initializers[name]
                assert value.const_value is not None
                value.const_value = ir.Tensor(np.zeros_like(value.const_value.numpy()), name=name)
        for value in self._values.values():
            value.shape = None if value.shape is None else ir.Shape([None] * len(value.shape))
        for spec, value in zip(self._contract.inputs, self._graph.inputs, strict=True):
            value.shape = ir.Shape(spec.shape)
        for spec, value in zip(self._contract.outputs, self._graph.outputs, strict=True):
            value.shape = ir.Shape(spec.shape)

    def _name_outputs(self) -> None:
        """Give an output that has become a sum the name of its terms."""
        for spec, value in zip(self._contract.outputs, self._graph.outputs, strict=True):
            if value.name != spec.name:
                self._values[spec.name].name = f"{spec.name}.own"
                value.name = spec.name

    def _change(self, node: ir.Node) -> None:
        key = str(node.outputs[0].name)
        if key in self._found.lookups:
            self._look_up_own(node, self._found.lookups[key])
        if key in self._found.heads:
            node.attributes["num_heads"] = ir.AttrInt64("num_heads", self._found.heads[key])
        if key in self._found.groups:
            node.attributes["group"] = ir.AttrInt64("group", self._found.groups[key])
        for (name, place), change in self._found.numbers.items():
            if name == key:
                self._set_numbers(node, place, change)
        for (name, place), (axis, size) in self._found.firsts.items():
            if name == key:
                self._take_first(node, place, axis, size)
        for (name, place), spread in self._found.shares.items():
            if name == key:
                self._take_share(node, place, spread)

    def _set_numbers(self, node: ir.Node, place: int, change: Mapping[int, int]) -> None:
        given = node.inputs[place]
        assert given is not None
        made: ir.Value
        if given.const_value is not None:
            numbers = given.const_value.numpy().copy()
            for at, number in change.items():
                numbers[at] = number
            made = self._constant(f"{given.name}.{_named(change)}", numbers)
        else:
            pieces, begin, nodes = list[ir.Value](), 0, list[ir.Node]()
            for at, number in sorted(change.items()):
                if at > begin:
                    pieces.append(self._slice(given, begin, at, nodes))
                pieces.append(self._constant(f"number.{number}", np.array([number])))
                begin = at + 1
            pieces.append(self._slice(given, begin, 2**31, nodes))
            joined = ir.node("Concat", pieces, {"axis": 0})
            joined.outputs[0].name = f"{node.outputs[0].name}.sizes.{place}"
            self._graph.insert_before(node, [*nodes, joined])
            made = joined.outputs[0]
        node.replace_input_with(place, made)

    def _slice(self, value: ir.Value, begin: int, end: int, nodes: list[ir.Node], axis: int = 0) -> ir.Value:
        numbers = (self._constant(f"number.{each}", np.array([each])) for each in (begin, end, axis))
        node = ir.node("Slice", [value, *numbers])
        node.outputs[0].name = f"{value.name}.from.{begin}.{end}.{len(self._graph)}.{len(nodes)}"
        nodes.append(node)
        return node.outputs[0]

    def _take_first(self, node: ir.Node, place: int, axis: int, size: int) -> None:
        """Let the node read so many of entries that are all alike."""
        given, nodes = node.inputs[place], list[ir.Node]()
        assert given is not None
        cut = self._slice(given, 0, size, nodes, axis)
        self._graph.insert_before(node, nodes)
        node.replace_input_with(place, cut)

    def _take_share(self, node: ir.Node, place: int, spread: Spread) -> None:
        """Let the node read this shard's part of a value that every shard has."""
        given = node.inputs[place]
        assert given is not None
        [part] = spread.parts
        begin = part.begin(self._rank, self._shards)
        ends = [
            self._constant(f"shard.{number}.{part.size}", np.array([at]))
            for number, at in (("begin", begin), ("end", begin + part.share(self._shards)))
        ]
        axis = self._constant(f"number.{spread.axis}", np.array([spread.axis]))
        cut = ir.node("Slice", [given, *ends, axis])
        cut.outputs[0].name = f"{node.outputs[0].name}.share.{place}"
        self._graph.insert_before(node, cut)
        node.replace_input_with(place, cut.outputs[0])

    def _look_up_own(self, node: ir.Node, rows: int) -> None:
        """Let a lookup find the rows that this shard has, and zeros for others."""
        ids, name = node.inputs[1], node.outputs[0].name
        first = self._constant("shard.first", np.array(self._rank * rows))
        nothing, last = self._constant("number.scalar.0", np.array(0)), self._constant("shard.last", np.array(rows - 1))
        own = ir.node("Sub", [ids, first])
        held = ir.node("Clip", [own.outputs[0], nothing, last])
        same = ir.node("Equal", [own.outputs[0], held.outputs[0]])
        each = ir.node("Unsqueeze", [same.outputs[0], self._constant("number.-1", np.array([-1]))])
        table = node.inputs[0]
        assert table is not None
        assert table.dtype is not None
        found = ir.node("Gather", [table, held.outputs[0]], {"axis": 0})
        zero = np.zeros((), table.dtype.numpy())
        for number, one in enumerate((own, held, same, each, found)):
            one.outputs[0].name = f"{name}.own.{number}"
        self._graph.insert_before(node, [own, held, same, each, found])
        kept = ir.node("Where", [each.outputs[0], found.outputs[0], self._constant(f"zero.{table.dtype}", zero)])
        kept.outputs[0].name = f"{name}.kept"
        self._replace(node, kept)

    def _replace(self, node: ir.Node, new: ir.Node) -> None:
        name = node.outputs[0].name
        self._graph.insert_before(node, new)
        node.outputs[0].replace_all_uses_with(new.outputs[0], replace_graph_outputs=True)
        self._graph.remove(node, safe=True)
        new.outputs[0].name, new.outputs[0].type = name, node.outputs[0].type
        self._values[str(name)] = new.outputs[0]

    def _sum(self, name: str) -> None:
        """Sum a value over all shards, after its terms were computed in float64 if sums are to be exact."""
        value, wide = self._values[name], int(ir.DataType.DOUBLE)
        node = value.producer()
        assert node is not None
        if not self._exact or node.op_type == "Gather":  # only one shard has what is looked up
            self._between("AllReduce", value)
            return
        assert value.dtype is not None
        for place, given in enumerate(node.inputs):
            if given is not None and (place == 0 or not node.op_type.startswith("Reduce")):  # which have axes, too
                cast = ir.node("Cast", [given], {"to": wide})
                cast.outputs[0].name = f"{given.name}.wide.{place}.{name}"  # adapters find a product by its matrix
                cast.outputs[0].type = ir.TensorType(ir.DataType.DOUBLE)
                self._graph.insert_before(node, cast)
                node.replace_input_with(place, cast.outputs[0])
        narrow = ir.node("Cast", [value], {"to": int(value.dtype)})
        narrow.outputs[0].name, narrow.outputs[0].type = f"{name}.narrow", value.type
        value.replace_all_uses_with(narrow.outputs[0], replace_graph_outputs=True)
        narrow.replace_input_with(0, value)
        self._graph.insert_after(node, narrow)
        value.type = ir.TensorType(ir.DataType.DOUBLE)
        self._between("AllReduce", value)

    def _mean(self, name: str) -> None:
        """Let a mean be the mean of those of all shards, which have as many entries each."""
        node, value = self._values[name].producer(), self._values[name]
        assert node is not None
        assert value.dtype is not None
        own = ir.node("ReduceMean", node.inputs, node.attributes)
        own.outputs[0].name, own.outputs[0].type = total_of(name), value.type
        self._values[total_of(name)] = own.outputs[0]
        shards = self._constant(f"shards.{value.dtype}", np.array(self._shards, value.dtype.numpy()))
        mean = ir.node("Div", [own.outputs[0], shards])
        self._graph.insert_before(node, own)
        self._replace(node, mean)

    def _norm(self, name: str, size: int) -> None:
        """Let a norm over what is spread divide by the root of a mean over all shards."""
        node = self._values[name].producer()
        assert node is not None
        x, scale = node.inputs[:2]
        assert x is not None
        assert scale is not None
        assert scale.dtype is not None
        kind = ir.DataType.DOUBLE if self._exact else ir.DataType.FLOAT
        numbers = kind.numpy()
        wide = ir.node("Cast", [x], {"to": int(kind)})
        square = ir.node("Mul", [wide.outputs[0]] * 2)
        last = self._constant("axes.-1", np.array([-1]))
        total = ir.node("ReduceSum", [square.outputs[0], last], {"keepdims": 1})
        entries = self._constant(f"entries.{size}.{kind}", np.array(size, numbers))
        mean = ir.node("Div", [total.outputs[0], entries])
        least = node.attributes["epsilon"].as_float()
        apart = ir.node("Add", [mean.outputs[0], self._constant(f"epsilon.{least}.{kind}", np.array(least, numbers))])
        root = ir.node("Sqrt", [apart.outputs[0]])
        normed = ir.node("Div", [wide.outputs[0], root.outputs[0]])
        narrow = ir.node("Cast", [normed.outputs[0]], {"to": int(scale.dtype)})
        scaled = ir.node("Mul", [narrow.outputs[0], scale])
        made = [wide, square, total, mean, apart, root, normed, narrow, scaled]
        for number, one in enumerate(made):
            one.outputs[0].name = f"{name}.norm.{number}"
        self._graph.insert_before(node, made[:-1])
        self._replace(node, scaled)
        self._between("AllReduce", total.outputs[0])

    def _between(self, op: str, value: ir.Value, **attributes: int) -> ir.Value:
        """Put an operator between shards after a value, for all who read it."""
        if self._shards == 1:
            return value
        made = value.producer()
        assert made is not None
        node = ir.node(op, [value], attributes, domain=DOMAIN)
        node.outputs[0].name, node.outputs[0].type = f"{value.name}.{op}", value.type
        value.replace_all_uses_with(node.outputs[0], replace_graph_outputs=True)
        node.replace_input_with(0, value)
        self._graph.insert_after(made, node)
        return node.outputs[0]

    def _gather_logits(self, spread: Spread) -> None:
        """Let the logits be those of all shards, side by side, without what the last one is padded with."""
        value = self._values[LOGITS]
        value.name = f"{LOGITS}.own"
        made = self._between("AllGather", value, shards=self._shards)
        if spread.parts[0].size > self._contract.vocab_size:
            nodes: list[ir.Node] = []
            cut = self._slice(made, 0, self._contract.vocab_size, nodes, axis=2)
            self._graph.append(nodes[0])
            self._graph.outputs[0] = cut
            cut.type, made = made.type, cut
        made.name = LOGITS

    def _constant(self, name: str, numbers: Any) -> ir.Value:
        if name not in self._graph.initializers:
            tensor = ir.Tensor(numbers, name=name)
            value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
            self._graph.register_initializer(value)
        return self._graph.initializers[name]


def _named(change: Mapping[int, int]) -> str:
    return "-".join(f"{at}.{number}" for at, number in change.items())


def _keep(value: ir.Value, cut: Cut, rank: int, shards: int) -> None:
    """Let a constant be a shard's part of it, which is read when it is written."""
    whole = value.const_value
    assert whole is not None
    shape = list(whole.shape.numpy())
    shape[cut.axis] = sum(part.share(shards) for part in cut.parts)

    def own() -> ir.Tensor[Any]:
        array, begin, taken = whole.numpy(), 0, []
        for part in cut.parts:
            at, share = begin + part.begin(rank, shards), part.share(shards)
            piece = array.take(range(at, min(at + share, array.shape[cut.axis])), cut.axis)
            if (missing := share - piece.shape[cut.axis]) > 0:  # of a table that is padded
                rest = [(0, 0)] * array.ndim
                rest[cut.axis] = (0, missing)
                piece = np.pad(piece, rest)
            taken.append(piece)
            begin += part.size
        return ir.Tensor(np.concatenate(taken, cut.axis), dtype=whole.dtype, name=value.name)

    value.const_value = ir.LazyTensor(own, dtype=whole.dtype, shape=ir.Shape(shape), name=value.name)
    value.shape = ir.Shape(shape)
