"""Walks a graph in its order, and finds how every value is spread over shards, from the columns of matrices on."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from ...engines import FEATURES, own_share
from ...engines.torch.conversion import run_node
from ...engines.torch.onnx_graph import Graph, Node
from .found import ALONE, Cut, Found
from .spread import Part, Seed, Shape, Spread, Whole

Outputs = Sequence[Spread | None]
Rule = Callable[["Walk", Node], Outputs]
SUMMED = None  # after a sum between shards, each has the whole value
BEGINS = ("Expand", "Gather", "Gemm", "MatMul")  # operators whose outputs may be spread though their inputs are whole
LOGITS = "logits"
NUMBERS = 64  # a constant of no more is a shape, not a weight


class Walk:
    """One way through the graph. It ends with `Respread` where a matrix has to be spread in another way."""

    def __init__(
        self,
        graph: Graph,
        whole: dict[str, Tensor],
        shards: int,
        rows: int,
        kinds: dict[str, "tuple[Part, ...] | None"],
    ) -> None:
        self.shards, self.rows = shards, rows  # of the table of tokens
        self.found = Found()
        self._graph, self._values, self.kinds = graph, whole, kinds
        self._spread = self.found.spreads
        self._numbers: dict[str, Tensor] = {}  # what each shard has of shapes
        self._own_sizes: dict[str, frozenset[Seed]] = {}  # those that differ from the whole graph's
        self.maker = {output: node for node in graph.nodes for output in node.outputs}
        self._constant = set(graph.constants)
        # States that a row has one value of, as long as nothing has read them whole.
        self._states = {name for name in whole if name.startswith("past_")} - {
            node.inputs[0] for node in graph.nodes if node.op == "TensorScatter"
        }
        self.keys = self._read_by_attention()
        self._summed = {name: frozenset[Seed]() for name in whole if name.startswith("past_")}
        self._demands: dict[str, set[Cut | None]] = {}
        self._demanders: dict[str, set[Seed]] = {}
        self._asked: set[str] = set()  # of which inputs the rule of a node has said how it reads them

    def run(self, rules: dict[str, Rule]) -> Found:
        for node in self._graph.nodes:
            given = [name for name in node.inputs if name]
            if self._is_number(node):
                self._compute(node)
                self.read_whole(node)
                continue
            self._asked.clear()
            if given and all(name in self._constant for name in given):
                self._constant.update(node.outputs)
            elif not any(name in self._spread for name in given) and node.op not in BEGINS:
                self.read_whole(node)
            else:
                if node.op not in rules:
                    raise Whole(self.seeds(node), f"{node.op} has no rule")
                for name, spread in zip(node.outputs, rules[node.op](self, node), strict=True):
                    if spread is not None and not spread.whole:
                        self._spread[name] = spread
                for name in set(given) - self._asked:
                    self.demand(name, None, self.seeds(node))
            if own := [self._own_sizes[name] for name in given if name in self._own_sizes.keys() - self._asked]:
                raise Whole(frozenset[Seed]().union(*own), f"{node.op} reads the size of what is spread")
            self._trace(node)
            self._states.difference_update(set(given) - set(self._spread))
        for spec in self._graph.outputs:
            self._require_known(spec.name)
        for name, cuts in self._demands.items():
            if len(cuts) > 1:
                raise Whole(frozenset(self._demanders[name]), f"{name} is read in two ways")
            [cut] = cuts
            if cut == ALONE:
                self.found.alone.add(name)
            elif cut is not None:
                self.found.cuts[name] = cut
        return self.found

    def _read_by_attention(self) -> set[str]:
        """Return the inputs whose entries attention reads."""
        read = {name for node in self._graph.nodes if node.op == "Attention" for name in node.inputs[1:3]}
        return {node.inputs[0] for node in self._graph.nodes if node.op == "TensorScatter" and node.outputs[0] in read}

    def _require_known(self, output: str) -> None:
        """Ask for an output whole that the first shard reads: all but logits, which are gathered, and the cache."""
        spread, past = self.spread(output), output.replace("present_", "past_", 1)
        if output == LOGITS:
            if spread is not None and not self._gathered(spread):
                raise Whole(spread.seeds, "logits are gathered side by side")
            return
        kept = self.spread(past) if past not in (output, f"past_{FEATURES}") else None
        seeds = frozenset[Seed]().union(*(one.seeds for one in (spread, kept) if one))
        if (spread is None) != (kept is None):
            raise Whole(seeds, f"the first shard reads {output}")
        if spread and kept and (spread.axis != kept.axis or not spread.alike(kept.parts, self.shards)):
            raise Whole(seeds, f"{output} is spread in another way than {past}")

    def _gathered(self, logits: Spread) -> bool:
        """Whether logits are what each shard has, side by side, and nothing reads them but the first shard."""
        read = any(LOGITS in node.inputs for node in self._graph.nodes)
        in_order = len(logits.parts) * logits.blocks == 1 and not logits.twice(self.shards)
        return in_order and not read and logits.axis == len(self.shape(LOGITS)) - 1

    def _trace(self, node: Node) -> None:
        """Note of which sum each output comes that is whole, if of a single one."""
        matrix = node.inputs[1] if node.op in ("MatMul", "Gemm") else ""
        if node.outputs[0] in self.found.sums and self.is_constant(matrix):
            self._summed[node.outputs[0]] = self.seeds(node)
        elif node.op == "Gather" and node.inputs[0] in self.tables and self.is_float(node.inputs[0]):
            self._summed[node.outputs[0]] = frozenset()
        elif origins := {self._summed[name] for name in node.inputs if name in self._summed}:
            self._summed.update(dict.fromkeys(node.outputs, origins.pop() if len(origins) == 1 else frozenset()))

    # What rules ask.

    def whole(self, name: str, seeds: frozenset[Seed], why: str) -> Whole:
        """Refuse to read a value whole beside what these seeds spread.

        If it is a sum over what a smaller matrix before it has spread, that one is held whole instead, so that the
        columns of the larger one can be spread.
        """
        return Whole(self._summed.get(name) or seeds, why)

    def spread(self, name: str) -> Spread | None:
        return self._spread.get(name) if name else None

    def seeds(self, node: Node) -> frozenset[Seed]:
        return frozenset[Seed]().union(*(each.seeds for name in node.inputs if (each := self.spread(name))))

    def shape(self, name: str) -> Shape:
        return tuple(self._values[name].shape)

    def local(self, name: str) -> Shape:
        spread = self.spread(name)
        return self.shape(name) if spread is None else spread.local(self.shape(name), self.shards)

    def read_whole(self, node: Node) -> None:
        for name in filter(None, node.inputs):
            self.demand(name, None, frozenset())

    def takes(self, name: str, axis: int, spread: Spread) -> bool:
        """Whether a value can be spread as its reader is: a state of a row can."""
        if name not in self._states:
            return False
        self._spread[name] = spread.along(axis)
        return True

    def has_share(self, name: str, axis: int, spread: Spread) -> bool:
        """Whether a value is made of sizes, and is by itself in every shard what goes with a spread."""
        if name not in self._own_sizes:
            return False
        whole, own, shards = self._values[name], self._numbers[name], self.shards
        if any(not torch.equal(own, own_share(whole, axis, spread.parts, rank, shards)) for rank in range(shards)):
            return False
        self._asked.add(name)
        return True

    def is_of_positions(self, name: str) -> bool:
        """Whether a value depends on where tokens stand, and not on what they are."""
        return name not in self._summed

    def repeats(self, name: str, axis: int) -> bool:
        """Whether a value is the same at all places of an axis, as it was expanded along it."""
        node = self.maker.get(name)
        if node is None or node.op != "Expand":
            return False
        before = self.shape(node.inputs[0])
        place = axis - (len(self.shape(name)) - len(before))
        return place < 0 or before[place] == 1

    def integers(self, name: str) -> list[int]:
        """Return the numbers of axes or sizes, as each shard computes them."""
        found = self.number(name)
        assert found is not None, f"{name} depends on data"
        return [int(each) for each in found.reshape(-1)]

    @property
    def tables(self) -> Collection[str]:
        """The constants that the graph has, and does not compute."""
        return self._graph.constants

    def is_float(self, name: str) -> bool:
        return self._values[name].is_floating_point()

    def is_constant(self, name: str) -> bool:
        return name in self._constant

    def columns(self, name: str, size: int) -> tuple[Part, ...] | None:
        """Return how the columns of a matrix are spread, None if every shard has it whole."""
        kind = self.kind(name)
        if kind not in self.kinds:
            self.kinds[kind] = (Part(size, size),)
        parts = self.kinds[kind]
        if parts is not None and (odd := [part.units for part in parts if not part.fits(self.shards)]):
            seeds = frozenset((kind, place) for place in range(len(parts)))
            raise Whole(seeds, f"{self.shards} shards do not divide {odd[0]}")
        return parts

    def kind(self, name: str) -> str:
        """Say what a constant is in its layer: those of one size are spread alike in all layers."""
        return f"{re.sub(r'[0-9]+', '#', name)} {list(self.shape(name))}"

    def demand(self, name: str, cut: Cut | None, seeds: frozenset[Seed], *, padded: bool = False) -> None:
        """Note that a constant is read so, or what it is computed from."""
        node, shape = self.maker.get(name), self.shape(name)
        if not self.is_constant(name):
            if cut is not None:
                raise Whole(seeds, f"{name} is computed")
            return
        self._asked.add(name)
        size = None if cut in (None, ALONE) or padded else sum(part.size for part in cut.parts)
        if cut and size is not None and (not shape or shape[cut.axis] != size):
            raise Whole(seeds, f"{name} is broadcast to what is spread")
        if node is None:
            self._demands.setdefault(name, set()).add(cut)
            self._demanders.setdefault(name, set()).update(seeds)
            return
        if cut is None:
            for each in filter(None, node.inputs):
                self.demand(each, None, seeds)
        elif node.op == "Cast":
            self.demand(node.inputs[0], cut, seeds)
        elif node.op == "Transpose":
            self.demand(node.inputs[0], Cut(node.attributes["perm"][cut.axis], cut.parts), seeds)
        elif node.op == "DequantizeLinear":
            self._demand_quantised(node, cut, seeds)
        else:
            raise Whole(seeds, f"{name} is made by {node.op}")

    def _demand_quantised(self, node: Node, cut: Cut, seeds: frozenset[Seed]) -> None:
        whole = self.shape(node.inputs[0])
        for name in filter(None, node.inputs):
            shape = self.shape(name)
            axis = cut.axis
            if len(shape) == 1 and len(whole) > 1:  # one for each place of an axis
                if node.attributes.get("axis", 1) % len(whole) != axis:
                    self.demand(name, None, seeds)
                    continue
                axis = 0
            block = 1 if not shape else whole[cut.axis] // shape[axis]
            if not shape:
                self.demand(name, None, seeds)
                continue
            if any(part.share(self.shards) % block or part.size % block for part in cut.parts):
                raise Whole(seeds, f"blocks of {block} lie across shards")
            parts = tuple(Part(p.size // block, min(p.units, p.size // block)) for p in cut.parts)
            self.demand(name, Cut(axis, parts), seeds)

    def sized(self, node: Node, place: int, wanted: Mapping[int, int], seeds: frozenset[Seed]) -> None:
        """Let a node read sizes [n] that give what a shard has: these at these places."""
        name = node.inputs[place]
        found = self.number(name)
        if found is None:
            raise Whole(seeds, f"the sizes {name} are not known")
        if change := {at: size for at, size in wanted.items() if found[at] not in (size, -1)}:
            self.found.numbers[node.outputs[0], place] = change

    # Shapes.

    def _is_number(self, node: Node) -> bool:
        return node.op == "Shape" or all(not self._values[name].is_meta for name in node.outputs)

    def _compute(self, node: Node) -> None:
        """Compute a number as each shard does, and note whether it is another than the whole graph's."""
        given = set(filter(None, node.inputs))
        if node.op == "Shape":
            [name] = node.inputs
            start, end = node.attributes.get("start", 0), node.attributes.get("end")
            self._numbers[node.outputs[0]] = torch.tensor(self.local(name)[start:end], dtype=torch.int64)
            seeds = self.seeds(node)
        else:
            values = {name: self._numbers.get(name, self._values[name]) for name in given}
            run_node(node, values)
            self._numbers.update({name: values[name] for name in node.outputs})
            seeds = frozenset[Seed]().union(*(self._own_sizes.get(name, ()) for name in given))
        for name in node.outputs:
            if not torch.equal(self._numbers[name], self._values[name]):
                self._own_sizes[name] = seeds

    def number(self, name: str) -> Tensor | None:
        value = self._values[name]
        return None if value.is_meta else value


def only(walk: Walk, node: Node) -> Spread:
    """Return how the first input is spread, of an operator whose others are numbers."""
    spread = walk.spread(node.inputs[0])
    if spread is None or any(walk.spread(name) for name in node.inputs[1:]):
        raise Whole(walk.seeds(node), f"{node.op} reads by what is spread")
    return spread
