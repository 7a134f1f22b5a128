"""Refuses graphs with an operator, an attribute or a cache that the engine `torch` does not support."""

from ..contract import AnyContract
from ..errors import EngineError
from .onnx_graph import Node
from .ops import FIXED, OPS


def refuse_unknown(graph: str, nodes: list[Node]) -> None:
    for node in nodes:
        if node.op not in OPS:
            raise EngineError(
                f"{graph} has the operator {node.op} ({node.name}), which engine torch does not support; use another"
            )
        for name, value in node.attributes.items():
            if name in FIXED and value != FIXED[name]:
                raise EngineError(
                    f"{graph} has the operator {node.op} ({node.name}) with {name} = {value!r}; engine torch "
                    f"supports only {FIXED[name]!r}"
                )


def refuse_copied_cache(graph: str, contract: AnyContract, nodes: list[Node]) -> None:
    """Refuse a graph where anything but its TensorScatter reads a cache input: it might see it before or after."""
    makers = {output: node for node in nodes for output in node.outputs}
    for present, past in contract.aliases.items():
        readers = [node.op for node in nodes if past in node.inputs and node.op != "Shape"]
        maker = makers.get(present)
        if readers != ["TensorScatter"] or maker is None or (maker.op, maker.inputs[0]) != ("TensorScatter", past):
            raise EngineError(
                f"{graph} does not make {present} from {past} by one TensorScatter, so not in place; export it again"
            )
