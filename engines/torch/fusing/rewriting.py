"""The nodes of a graph while rows of the table make one node of several."""

from collections.abc import Collection, Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...contract import AnyContract
from ..onnx_graph import Node
from ..ops import FIXED, IGNORED

FUSED = "trt_spec"  # the domain of operators that replace several of ONNX


class Rewriting:
    """The nodes, the constants they read, and who makes and who reads each value."""

    def __init__(
        self,
        nodes: Sequence[Node],
        constants: dict[str, Tensor],
        contract: AnyContract,
        device: str,
        four_bits: Collection[str] = (),
    ) -> None:
        self.constants, self.contract, self.device, self.four_bits = constants, contract, device, set(four_bits)
        self.outputs = [spec.name for spec in contract.outputs]  # what the caller reads
        self._nodes = {id(node): node for node in nodes}  # equal nodes are two nodes
        self._makers = {output: node for node in nodes for output in node.outputs}
        self._readers: dict[str, list[Node]] = {}
        for node in nodes:
            for value in set(node.inputs):
                self._readers.setdefault(value, []).append(node)

    def all(self, op: str) -> Iterator[Node]:
        """Return the nodes of this operator that are still there when their turn comes."""
        return (node for node in list(self._nodes.values()) if node.op == op and id(node) in self._nodes)

    def maker(self, value: str, op: str | None = None) -> Node | None:
        """Return the node that makes a value, if it has this operator."""
        node = self._makers.get(value)
        return node if node is not None and op in (None, node.op) else None

    @staticmethod
    def understood(node: Node, *attributes: str) -> bool:
        """Say whether a node has no attribute but these and those that are refused unless they change nothing."""
        return set(node.attributes) <= {*attributes, *FIXED, *IGNORED}

    def readers(self, value: str) -> Sequence[Node]:
        return self._readers.get(value, ())

    def only_reader(self, value: str, op: str | None = None) -> Node | None:
        """Return the node that alone reads a value, if it has this operator and the caller does not read the value."""
        readers = self.readers(value)
        if len(readers) != 1 or value in self.outputs or op not in (None, readers[0].op):
            return None
        return readers[0]

    def replace(self, old: Sequence[Node], *new: Node) -> None:
        """Put nodes in the place of others; what the others made for themselves alone is no longer made."""
        for node in old:
            del self._nodes[id(node)]
            for output in node.outputs:
                del self._makers[output]
            for value in set(node.inputs):
                self._readers[value] = [reader for reader in self._readers[value] if reader is not node]
        for node in new:
            self._nodes[id(node)] = node
            self._makers |= dict.fromkeys(node.outputs, node)
            for value in set(node.inputs):
                self._readers.setdefault(value, []).append(node)

    def join(self, names: Sequence[str], whole: str) -> None:
        """Make one constant on the device of the columns of several, which are freed."""
        parts = [self.constants.pop(name).to(self.device) for name in names]
        narrow = parts[0].dtype.itemsize == 1  # not every type of one byte can be joined
        bytes_or_numbers = [part.view(torch.uint8) if narrow else part for part in parts]
        self.constants[whole] = torch.cat(bytes_or_numbers, -1).view(parts[0].dtype)
        if self.four_bits.issuperset(names):
            self.four_bits.add(whole)

    def in_order(self) -> list[Node]:
        """Return the nodes that the outputs need, each after those whose outputs it reads."""
        return self.needed_for(self.outputs)

    def needed_for(self, values: Sequence[str], given: Container[str] = ()) -> list[Node]:
        """Return the nodes that make values of those given, in an order in which they can run."""
        found: dict[int, Node] = {}
        waiting = [self._makers[value] for value in reversed(values) if value in self._makers and value not in given]
        while waiting:
            one = waiting[-1]
            makers = [self._makers[value] for value in one.inputs if value in self._makers and value not in given]
            missing = [maker for maker in makers if id(maker) not in found]
            if not missing:
                found[id(waiting.pop())] = one
            waiting += missing
        return list(found.values())


def fused(op: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> Node:
    """Make a node of an operator of ours, named after its first output."""
    return Node(outputs[0], f"{FUSED}::{op}", tuple(inputs), tuple(outputs), attributes)
