"""Whatever a graph does, its shards compute the same, or have whole what cannot be spread."""

from pathlib import Path
from typing import Any

import pytest

from ...kit.small_graphs import HIDDEN, VOCAB, Made, off, small_graph

OUT: Made = ("MatMul", "y out", "logits", {})
WIDE = {"up": (HIDDEN, 8), "out": (8, VOCAB)}
Case = tuple[list[Made], dict[str, Any], dict[str, tuple[int, ...]]]  # nodes, constants and states
CASES: dict[str, Case] = {
    "logits of two matrices side by side": (
        [
            ("MatMul", "x left", "a", {}),
            ("MatMul", "x right", "b", {}),
            ("Concat", "a b", "logits", {"axis": 2}),
        ],
        {"left": (HIDDEN, 8), "right": (HIDDEN, 8)},
        {},
    ),
    "logits that are a sum": ([("MatMul", "x up", "a", {}), ("Tanh", "a", "y", {}), OUT], WIDE, {}),
    "logits that are a norm over what is spread": (
        [("MatMul", "x up", "y", {}), ("RMSNormalization", "y scale", "logits", {"axis": -1, "epsilon": 1e-2})],
        {"up": (HIDDEN, VOCAB), "scale": (VOCAB,)},
        {},
    ),
    "logits that something else reads": (
        [
            ("MatMul", "x up", "logits", {}),
            ("MatMul", "logits down", "a", {}),
            ("ReduceSum", "a one", "present_r", {"keepdims": 0}),
        ],
        {"up": (HIDDEN, VOCAB), "down": (VOCAB, 8), "one": [1]},
        {"r": (8,)},
    ),
    "a bias of one number": (
        [
            ("Reshape", "x folded", "a", {}),
            ("Gemm", "a up one", "b", {}),
            ("Shape", "x", "rows", {"start": 0, "end": 2}),
            ("Concat", "rows width", "size", {"axis": 0}),
            ("Reshape", "b size", "c", {}),
            ("Tanh", "c", "d", {}),
            ("MatMul", "x first", "e", {}),
            ("Add", "d e", "y", {}),
            OUT,
        ],
        {**WIDE, "first": (HIDDEN, 8), "one": (1,), "folded": [-1, 8], "width": [8]},
        {},
    ),
    "a bias that is computed of what is summed": (
        [
            ("MatMul", "x first", "e", {}),
            ("Reshape", "e folded", "a", {}),
            ("Neg", "bias", "least", {}),
            ("Gemm", "a up least", "b", {}),
            ("Shape", "x", "rows", {"start": 0, "end": 2}),
            ("Concat", "rows width", "size", {"axis": 0}),
            ("Reshape", "b size", "y", {}),
            OUT,
        ],
        {**WIDE, "first": (HIDDEN, 8), "bias": (8,), "folded": [-1, 8], "width": [8]},
        {},
    ),
    "a scale of one number": (
        [("MatMul", "x up", "a", {}), ("RMSNormalization", "a scale", "y", {"axis": -1, "epsilon": 1e-2}), OUT],
        {**WIDE, "scale": (1,)},
        {},
    ),
    "a small constant that is read as it is and computed with": (
        [
            ("MatMul", "x up", "a", {}),
            ("Add", "a bias", "b", {}),
            ("Exp", "bias", "c", {}),
            ("Mul", "x c", "d", {}),
            ("MatMul", "b out", "e", {}),
            ("ReduceSum", "d two", "f", {"keepdims": 1}),
            ("Add", "e f", "logits", {}),
        ],
        {**WIDE, "bias": (8,), "two": [2]},
        {},
    ),
    "a product with a constant on the left that is read elsewhere": (
        [
            ("MatMul", "x up", "a", {}),
            ("MatMul", "a square", "b", {}),
            ("MatMul", "past_r right", "c", {}),
            ("MatMul", "square c", "d", {}),
            ("MatMul", "d down", "present_r", {}),
            ("Tanh", "b", "y", {}),
            OUT,
        ],
        {**WIDE, "square": (8, 8), "right": (4, 8), "down": (8, 4)},
        {"r": (8, 4)},
    ),
    "a product with a row of numbers": (
        [
            ("MatMul", "x up", "a", {}),
            ("Reshape", "a heads", "b", {}),
            ("MatMul", "b row", "c", {}),
            ("Softmax", "c", "d", {"axis": 2}),
            ("Mul", "d scale", "e", {}),
            ("ReduceSum", "e all", "f", {"keepdims": 1}),
            ("Add", "x f", "y", {}),
            OUT,
        ],
        {"up": (HIDDEN, 32), "out": (8, VOCAB), "heads": [0, 0, 8, 4], "row": (4,), "scale": (8,), "all": [1, 2]},
        {},
    ),
    "a number that is the size of what is spread": (
        [
            ("MatMul", "x up", "a", {}),
            ("Shape", "a", "size", {"start": 2, "end": 3}),
            ("Cast", "size", "number", {"to": 11}),
            ("Div", "x number", "y", {}),
            OUT,
        ],
        WIDE,
        {},
    ),
    "a mean over rows and over what is spread": (
        [
            ("MatMul", "x up", "a", {}),
            ("ReduceMean", "a all", "b", {"keepdims": 1}),
            ("Add", "x b", "y", {}),
            OUT,
        ],
        {**WIDE, "all": [0, 2]},
        {},
    ),
    "every second entry of the first half": (
        [
            ("MatMul", "x up", "a", {}),
            ("Slice", "a zero end last two", "y", {}),
            OUT,
        ],
        {"up": (HIDDEN, 16), "out": (4, VOCAB), "zero": [0], "end": [8], "last": [2], "two": [2]},
        {},
    ),
    "halves, one of which no two shards can share": (
        [
            ("MatMul", "x up", "a", {}),
            ("Slice", "a two three two", "b", {}),
            ("Split", "a", "c d", {"axis": 2, "num_outputs": 2}),
            ("MatMul", "c out", "e", {}),
            ("ReduceSum", "d two", "f", {"keepdims": 1}),
            ("Add", "e f", "g", {}),
            ("Add", "g b", "logits", {}),
        ],
        {"up": (HIDDEN, 4), "out": (2, VOCAB), "two": [2], "three": [3]},
        {},
    ),
    "a state that is read whole before it is read like what is spread": (
        [
            ("MatMul", "past_r square", "a", {}),
            ("MatMul", "past_r right", "b", {}),
            ("Mul", "b past_r", "c", {}),
            ("Mul", "a c", "present_r", {}),
            ("MatMul", "x up", "y", {}),
            OUT,
        ],
        {**WIDE, "square": (8, 8), "right": (8, 8)},
        {"r": (8,)},
    ),
    "a state that comes in shares and leaves whole": (
        [
            ("MatMul", "x up", "a", {}),
            ("ReduceSum", "a one", "b", {"keepdims": 0}),
            ("Mul", "b past_r", "c", {}),
            ("MatMul", "c square", "d", {}),
            ("Tanh", "d", "present_r", {}),
            ("Tanh", "a", "y", {}),
            OUT,
        ],
        {**WIDE, "square": (8, 8), "one": [1]},
        {"r": (8,)},
    ),
    "a state that leaves in other shares than it comes": (
        [
            ("MatMul", "x up", "a", {}),
            ("ReduceSum", "a one", "b", {"keepdims": 0}),
            ("Unsqueeze", "b one", "c", {}),
            ("Mul", "c past_r", "d", {}),
            ("Transpose", "d", "present_r", {"perm": [0, 2, 1]}),
            ("Tanh", "a", "y", {}),
            OUT,
        ],
        {**WIDE, "one": [1]},
        {"r": (8, 8)},
    ),
    "a small table that is also the last matrix": (
        [
            ("Transpose", "small", "turned", {"perm": [1, 0]}),
            ("Gather", "small input_ids", "y", {}),
            ("MatMul", "y turned", "logits", {}),
        ],
        {"small": (VOCAB, 2)},
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("exact", [False, True])
def test_shards_of_a_graph_compute_what_it_does(case: str, exact: bool, tmp_path: Path) -> None:
    nodes, constants, states = CASES[case]
    contract = small_graph(tmp_path, nodes, constants, states)
    assert off(tmp_path, contract, 2, exact, rows=2, width=3) < 1e-5, "a norm between inexact shards is in float32"
