"""Trace one layer of each kind: in the trace the others are a node each, in whose place copies of its nodes come.

A layer takes torch seconds to trace, and all but a few of a model are alike.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

DOMAIN = "trt_spec.layers"
ENTER, LEAVE, AGAIN = "Enter", "Leave", "Again"  # a traced layer's first and last node; a layer like it
OWN_PLACE = "its own place"
PLAIN = (bool, int, float, str, type(None), torch.dtype)


class _Traced(NamedTuple):
    """The layer that was traced of a kind."""

    place: int
    outputs: list[Any]  # of which one is a tensor
    hidden: int  # and which
    structure: pytree.TreeSpec


class _Kinds:
    """The kinds of layers that a trace has met."""

    def __init__(self, config: Any, layers: list[nn.Module], kept: dict[str, Tensor]) -> None:
        self.config, self.layers, self.kept = config, layers, kept
        self.traced: dict[Hashable, _Traced] = {}
        self.seen: list[Any] = []  # by its id, so that none is given away

    def call(self, place: int, *args: Any, **kwargs: Any) -> Any:
        """Trace a layer of a new kind, and make a node of one that is like another."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        hidden = leaves[0]
        if not isinstance(hidden, Tensor):
            return self._run(place, args, kwargs)
        self.seen += leaves
        others = (OWN_PLACE if type(leaf) is int and leaf == place else _identity(leaf) for leaf in leaves[1:])
        same = (hidden.dtype, hidden.dim(), repr(structure), *others)
        kind = (self._described(place), same)
        if kind in self.traced:
            return self._again(place, hidden, self.traced[kind])
        before = dict(self.kept)
        leaves[0] = _marked(ENTER, hidden, place)
        outputs, structure = pytree.tree_flatten(self._run(place, *pytree.tree_unflatten(leaves, structure)))
        written = [name for name, state in self.kept.items() if state is not before[name]]
        tensors = [number for number, output in enumerate(outputs) if isinstance(output, Tensor)]
        if len(tensors) == 1 and written == self._own(place):
            outputs[tensors[0]] = _marked(LEAVE, outputs[tensors[0]], place)
            self.traced[kind] = _Traced(place, outputs, tensors[0], structure)
        return pytree.tree_unflatten(outputs, structure)

    def _own(self, place: int) -> list[str]:
        return [name for name in self.kept if _is_of(name, place)]

    def _run(self, place: int, args: Any, kwargs: Any) -> Any:
        layer: Any = self.layers[place]
        return type(layer).forward(layer, *args, **kwargs)

    def _again(self, place: int, hidden: Tensor, like: _Traced) -> Any:
        own = self._own(place)
        outputs = [like.outputs[like.hidden], *(self.kept[name] for name in own)]
        hidden, *states = torch.onnx.ops.symbolic_multi_out(
            f"{DOMAIN}::{AGAIN}",
            [hidden, *(self.kept[name] for name in own)],
            attrs={"layer": place, "like": like.place},
            dtypes=[output.dtype for output in outputs],
            shapes=[output.shape for output in outputs],
            version=1,
        )
        self.kept.update(zip(own, states, strict=True))
        found = list(like.outputs)
        found[like.hidden] = hidden
        return pytree.tree_unflatten(found, like.structure)

    def _described(self, place: int) -> Hashable:
        """Say all that a layer computes by but its weights."""
        own = [
            (name, value[place])
            for name, value in vars(self.config).items()
            if isinstance(value, list | tuple) and len(value) == len(self.layers)
        ]
        parts = [(name, type(part), *_attributes(part, place)) for name, part in self.layers[place].named_modules()]
        return repr((own, parts))


def _attributes(module: nn.Module, place: int) -> Iterator[Hashable]:
    for name, value in vars(module).items():
        if name in ("layer_idx", "layer_id") and value == place:
            yield name, OWN_PLACE
        elif name in ("_parameters", "_buffers"):
            yield (
                name,
                [(key, None if weight is None else (weight.dtype, *weight.shape)) for key, weight in value.items()],
            )
        elif name != "forward" and not name.startswith("_"):
            yield name, _identity(value)


def _identity(value: Any) -> Hashable:
    """Tell one value from another: by what it is made of where that is known, otherwise by which it is."""
    if isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, partial):
        return "partial", *map(_identity, (value.func, value.args, *value.keywords.items()))
    if isinstance(value, tuple | list):
        return tuple(map(_identity, value))
    return id(value)


def _marked(mark: str, hidden: Tensor, place: int) -> Tensor:
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::{mark}", [hidden], attrs={"layer": place}, dtype=hidden.dtype, shape=hidden.shape, version=1
    )


@contextmanager
def each_kind_once(model: Any, depth: int, kept: dict[str, Tensor]) -> Iterator[None]:
    """Have one layer of each kind traced until the block ends; they write to the states that are kept."""
    layers = layers_of(model, depth)
    kinds = _Kinds(model.config, layers, kept)
    for place, layer in enumerate(layers):  # of its own, before its class's; mypy lets no method be assigned
        setattr(layer, "forward", partial(kinds.call, place))  # noqa: B010
    try:
        yield
    finally:
        for layer in layers:
            delattr(layer, "forward")


def depth_of(model: Any) -> int:
    """Return how many layers a model has, those among them that keep no state."""
    depth: int = getattr(model, "depth", None) or model.config.num_hidden_layers
    return depth


def _is_of(state: str, place: int) -> bool:
    """Whether a state, or an end of the graph that is named after it, belongs to the layer at this place."""
    return state.rpartition("_")[2] == str(place)


def layers_of(model: nn.Module, count: int) -> list[nn.Module]:
    """Find the layers of a model."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == count)
    return list(next(lists, ()))


def layer_list(stack: nn.Module) -> nn.ModuleList:
    """Find the layers of an encoder or a decoder, however many it has."""
    return next(module for module in stack.modules() if isinstance(module, nn.ModuleList))


def repeat_layers(graph: ir.Graph, model: nn.Module, count: int) -> int:
    """Put copies of a traced layer's nodes in the place of each that is like it; returns how many of those are."""
    own = [_own_values(graph, model, layer) for layer in layers_of(model, count)]
    _order(graph, [value for values in own for value in values])
    inputs, outputs = (
        [[end for end in ends if _is_of(str(end.name), place)] for place in range(count)]
        for ends in (graph.inputs, graph.outputs)
    )
    bodies: dict[int, list[ir.Node]] = {}  # from Enter to Leave
    body: list[ir.Node] = []
    repeated = 0
    for node in list(graph):
        if node.domain != DOMAIN:
            body.append(node)
            continue
        place, like = (node.attributes.get_int(name, -1) for name in ("layer", "like"))
        if node.op_type == ENTER:
            body = bodies[place] = [node]
        elif node.op_type == LEAVE:
            body.append(node)
            body = []
        else:
            enter, *nodes, leave = bodies[like]
            copied: dict[Any, Any] = {enter.outputs[0]: node.inputs[0]}
            copied |= zip([*own[like], *inputs[like]], [*own[place], *inputs[place]], strict=True)
            graph.insert_before(node, _copies(nodes, copied, f".{place}"))
            for old, new in zip(node.outputs, [leave.inputs[0], *outputs[like]], strict=True):
                copied[new].name = old.name
                old.replace_all_uses_with(copied[new], replace_graph_outputs=True)
            graph.remove(node, safe=True)
            repeated += 1
    for node in [node for node in graph if node.domain == DOMAIN]:
        assert node.inputs[0] is not None
        node.outputs[0].replace_all_uses_with(node.inputs[0])
        graph.remove(node, safe=True)
    return repeated


def _copies(nodes: list[ir.Node], copied: dict[Any, Any], suffix: str) -> list[ir.Node]:
    """Copy nodes, reading of each value what it is copied to; what they make is added to that."""
    copies = []
    for node in nodes:
        copy = ir.Node(
            node.domain,
            node.op_type,
            [copied.get(value, value) for value in node.inputs],
            node.attributes.values(),
            num_outputs=len(node.outputs),
            version=node.version,
            name=f"{node.name}{suffix}",
        )
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            new.name, new.shape, new.type, new.const_value = f"{old.name}{suffix}", old.shape, old.type, old.const_value
        copied |= zip(node.outputs, copy.outputs, strict=True)
        copies.append(copy)
    return copies


def _own_values(graph: ir.Graph, model: nn.Module, layer: nn.Module) -> list[ir.Value]:
    """Find the weights of a layer in a graph, each layer's in the same order; torch drops those that no node reads."""
    names = {weight.data_ptr(): name for name, weight in model.named_parameters()}
    [prefix] = [name for name, module in model.named_modules() if module is layer]
    values = []
    for own_name, weight in [*layer.named_parameters(remove_duplicate=False), *layer.named_buffers()]:
        name = names.get(weight.data_ptr(), f"{prefix}.{own_name}")
        if name not in graph.initializers:
            stored = ir.tensor_adapters.TorchTensor(weight.detach(), name=name)
            kind = ir.TensorType(stored.dtype)
            graph.register_initializer(ir.Value(name=name, shape=stored.shape, type=kind, const_value=stored))
        values.append(graph.initializers[name])
    return values


def _order(graph: ir.Graph, own: list[ir.Value]) -> None:
    """Let the weights of all layers lie one after the other, as they will be written."""
    values = list(graph.initializers.values())
    ours = set(own)
    first = next((place for place, value in enumerate(values) if value in ours), 0)
    graph.initializers.clear()
    for value in dict.fromkeys([*values[:first], *own, *values[first:]]):
        graph.register_initializer(value)
