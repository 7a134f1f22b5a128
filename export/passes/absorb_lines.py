"""Let ONNX Runtime's LinearAttention absorb what is accepted and answer, where the tokens of a call form a line.

Two `If`s choose: a line whose tokens are all accepted, one whose tokens may be rejected, or any tree in the plain form.
That also computes the later steps of a draft, which absorb nothing, and prompts of unlike lengths read together.
"""

from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir

from .nodes import CONTRIB, TURNED, Nodes

QUERY, KEYS, VALUES, DECAYS, RATES = (f"recurrent_{name}" for name in ("query", "keys", "values", "decays", "rates"))
ANSWER = "recurrent_answer"
MARKS = (QUERY, KEYS, VALUES, DECAYS, RATES, ANSWER)
STATE, PAST = "present_state_", "past_state_"


def absorb_lines(model: ir.Model) -> int:
    """Give it each layer with such a state; returns how many there were."""
    graph = model.graph
    inputs = {str(value.name): value for value in graph.inputs}
    states = [value for value in graph.outputs if str(value.name).startswith(STATE)]
    if not states:
        return 0
    call, answers = _Call(graph, inputs), {}
    for answer in [value for node in graph for value in node.outputs if _mark(value) == ANSWER]:
        nodes, marks = _marks_before(answer)
        answers[marks[KEYS]] = answer, nodes, marks
    for state in states:
        nodes, marks = _marks_before(state)
        answer, more, others = answers[marks[KEYS]]
        past = inputs[str(state.name).replace(STATE, PAST, 1)]
        made: Sequence[ir.Value] = [answer, state]
        by: Collection[ir.Node] = nodes | more
        for stand, is_so in enumerate(call.is_line):
            line = call.along_a_line(marks | others, past, bool(stand))
            made, by = _branch(graph, is_so, line, by, made)
    graph.extend(call.nodes)
    graph.sort()
    model.opset_imports[CONTRIB] = 1
    return len(states)


def _fixed(value: ir.Value) -> list[int]:
    """Return all sizes of `[batch, …]` but the first."""
    assert value.shape is not None
    return [int(str(size)) for size in value.shape[1:]]


def _mark(value: ir.Value) -> str:
    return str(value.name).partition(".")[0]


def _marks_before(value: ir.Value) -> tuple[set[ir.Node], dict[str, ir.Value]]:
    """Return the nodes that a value is made by, back to marked values, and these."""
    nodes, marks, waiting = set[ir.Node](), dict[str, ir.Value](), [value]
    while waiting:
        node = waiting.pop().producer()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        for read in node.inputs:
            if read is not None and _mark(read) in MARKS:
                marks[_mark(read)] = read
            elif read is not None:
                waiting.append(read)
    return nodes, marks


def _branch(
    graph: ir.Graph, condition: ir.Value, line: ir.Graph, nodes: Collection[ir.Node], made: Sequence[ir.Value]
) -> tuple[list[ir.Value], list[ir.Node]]:
    """Move into a branch those of the nodes that nothing else needs; what they make, either branch makes.

    Returns what is made now, and the node that makes it.
    """
    moved = set[ir.Node]()
    for node in reversed([node for node in graph if node in nodes]):
        if all(value in made or {use.node for use in value.uses()} <= moved for value in node.outputs):
            moved.add(node)
    kept = [node for node in graph if node in moved]
    found = [ir.Value(name=value.name, shape=value.shape, type=value.type) for value in made]
    for old, new in zip(made, found, strict=True):
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        old.name = f"{old.name}.not_{line.name}"  # no two values of a model may have the same
    graph.remove(kept)
    other = ir.Graph((), made, nodes=kept, name=f"not_{line.name}")
    choice = ir.node("If", [condition], {"then_branch": line, "else_branch": other}, outputs=found)
    graph.append(choice)
    return found, [choice]


class _Call:
    """What all layers need to know of a call: whether it is a line, accepted whole or not, and what is pending."""

    def __init__(self, graph: ir.Graph, inputs: Mapping[str, ir.Value]) -> None:
        self._graph, op = graph, Nodes(graph)
        depths, count, pending = (inputs[name] for name in ("depths", "count", "pending"))
        width, before = (op("Shape", value, start=1, end=2) for value in (depths, pending))
        own, number = (op("Range", op.stored(0), op("Squeeze", size), op.stored(1)) for size in (width, before))
        line = op("LessOrEqual", own, op("Unsqueeze", own, op.stored([1])))
        places = [op("Equal", inputs["ancestors"], line), op("Equal", depths, own)]

        def all_of(*said: ir.Value) -> ir.Value:
            each = [op("ReduceMin", op("Cast", one, to=ir.DataType.INT32), keepdims=0) for one in said]
            return op("Cast", op("Min", *each), to=ir.DataType.BOOL)

        self.is_line = [
            all_of(*places, op("Equal", inputs["fold"], absorbed)) for absorbed in (count, op("Add", count, width))
        ]
        self._sizes = op("Concat", before, width, axis=0)
        pending = op("Less", number, op("Unsqueeze", count, op.stored([1])))
        there = op("Concat", pending, op("Equal", depths, depths), axis=1)  # all of the own tokens
        self._there = op("Unsqueeze", there, op.stored([2]))  # [B, N, 1]
        self.nodes = op.made

    def along_a_line(self, marks: Mapping[str, ir.Value], state: ir.Value, own_stand: bool) -> ir.Graph:
        """Absorb the pending tokens, and answer after each of the call's own, which are absorbed if accepted."""
        op = Nodes(self._graph)
        heads, _, size = _fixed(state)

        def by_row(each: ir.Value) -> ir.Value:
            """Return `[B, H, N, D]` as `[B, N, H * D]`."""
            return op("Reshape", op("Transpose", each, perm=TURNED), op.stored([0, 0, -1]))

        def by_time(each: ir.Value) -> Sequence[ir.Value]:
            """Return of `[B, N, …]` the pending tokens' part and the own ones'."""
            return op.several(2, "Split", each, self._sizes, axis=1)

        def attend(*inputs: ir.Value) -> Sequence[ir.Value]:
            rule = "gated_delta" if RATES in marks else "gated"
            counts = {"q_num_heads": heads, "kv_num_heads": heads}
            return op.several(2, "LinearAttention", *inputs, domain=CONTRIB, update_rule=rule, scale=1.0, **counts)

        query, keys, values = (by_row(marks[name]) for name in (QUERY, KEYS, VALUES))
        gates = [by_row(marks[DECAYS])]  # of heads, or of their channels
        if RATES in marks:
            gates.append(op("Transpose", marks[RATES], perm=(0, 2, 1)))
        gates = [op("Where", self._there, each, op.stored(0.0)) for each in gates]
        if RATES not in marks:  # nothing is added for what is not there
            keys = op("Where", self._there, keys, op.stored(0.0))
        (old_keys, own_keys), (old_values, own_values), *each = (by_time(one) for one in (keys, values, *gates))
        if own_stand:
            asked = op("Concat", old_keys, query, axis=1)  # nobody reads what the first are answered
            answers, after = attend(asked, keys, values, state, *gates)
            said = by_time(answers)[1]
        else:
            _, after = attend(old_keys, old_keys, old_values, state, *(old for old, _ in each))
            said, _ = attend(query, own_keys, own_values, after, *(own for _, own in each))
        answer = op("Transpose", op("Reshape", said, op.stored([0, 0, heads, size])), perm=TURNED)
        name = f"{marks[KEYS].name}.{'standing' if own_stand else 'line'}"
        for number, value in enumerate(value for node in op.made for value in node.outputs):
            value.name = f"{name}.{number}"  # no two graphs of a model may have the same
        return ir.Graph((), (answer, after), nodes=op.made, name=name)
