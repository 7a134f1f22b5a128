"""Store a tied embedding once: the vocabulary projection multiplies by the table in which tokens are looked up."""

import onnx_ir as ir


def share_table(model: ir.Model) -> int:
    """Let a product with the turned copy of a table be one with the table itself; returns how many there were.

    `Gemm` reads a matrix either way. A Transpose of the table would be folded at load, which takes seconds a gigabyte.
    """
    graph = model.graph
    looked_up = [node.inputs[0] for node in graph if node.op_type == "Gather"]
    tables = {f"{table.name}.T": table for table in looked_up if table is not None}
    fired = 0
    for node in list(graph):
        turned = node.inputs[1] if node.op_type == "MatMul" else None
        if turned is None or not turned.is_initializer() or turned.name not in tables:
            continue
        _multiply(graph, node, tables[turned.name])
        if not turned.uses():
            del graph.initializers[turned.name]
        fired += 1
    return fired


def _multiply(graph: ir.Graph, product: ir.Node, table: ir.Value) -> None:
    """Put in the place of a product `[…, K] × [K, N]` one with a table `[N, K]`: of two dimensions, as Gemm wants."""
    tape, hidden, old = ir.tape.Tape(), product.inputs[0], product.outputs[0]
    assert table.shape is not None
    tokens, width = table.shape.numpy()
    flat = tape.initializer(ir.tensor([-1, width], name=f"{table.name}.flat"))
    columns = tape.initializer(ir.tensor([tokens], name=f"{table.name}.columns"))
    rows = tape.op("Reshape", [hidden, flat])
    found = tape.op("Gemm", [rows, table], {"transB": 1})
    sizes = tape.op("Concat", [tape.op("Shape", [hidden], {"end": -1}), columns], {"axis": 0})
    whole = tape.op("Reshape", [found, sizes])
    for stored in tape.initializers:
        graph.register_initializer(stored)
    rows.type = found.type = old.type
    ir.convenience.replace_nodes_and_values(graph, product, [product], tape.nodes, [old], [whole])
