"""The operations of a step fall into regions of few forms, which together compute what the whole does."""

from itertools import pairwise

import pytest
import torch
from trt_spec.engines import Bundle, blank_cache, blank_step, open_engine
from trt_spec.engines.torch import TorchEngine
from trt_spec.engines.torch.regions import regions, repeats

from ...kit.bundles import Pair


@pytest.fixture(scope="module")
def deep(demo: Pair) -> TorchEngine:
    """Eight layers."""
    bundle = Bundle.open(demo.bundle)
    engine = open_engine("torch-compiled", bundle.graph("target"), bundle.target.contract)
    assert isinstance(engine, TorchEngine)
    return engine


SIZES = {"batch": 2, "capacity": 16, "rows": 3, "tail": 3, "width": 3}


def test_layers_but_the_first_have_one_form_and_one_state_goes_from_one_to_the_next(deep: TorchEngine) -> None:
    """The first holds what is computed for all layers, too."""
    found = regions(deep.converted(SIZES).graph)
    assert [one.module.code for one in found].count(found[1].module.code) == len(found) - 2 == deep.contract.layers - 1
    for before, layer in pairwise(found[1:-1]):
        assert len(layer.makes) == 1
        assert layer.reads.count(before.makes[0]) == 1


def test_the_regions_of_a_step_write_what_the_step_writes(deep: TorchEngine) -> None:
    """Bit for bit, into the caches and the logits."""
    module = deep.converted(SIZES)
    nodes = list(module.graph.nodes)
    found = []
    for cut in (False, True):
        cache = blank_cache(deep.contract, 2, 16)
        step = blank_step(deep, cache, 0, 2, 3, 3)
        step.input_ids.copy_(torch.tensor([[5, 9, 17], [40, 41, 42]]))
        step.start.copy_(torch.tensor([0, 4]))
        given = [*(step.inputs[spec.name] for spec in deep.contract.inputs), step.logits]
        if cut:
            values = dict(zip((node for node in nodes if node.op == "placeholder"), given, strict=True))
            values |= {node: module.get_buffer(node.target) for node in nodes if node.op == "get_attr"}
            for one in regions(module.graph):
                values.update(zip(one.makes, one.module(*(values[node] for node in one.reads)), strict=True))
        else:
            module(*given)
        found.append([step.logits, *cache.values()])
    assert found[0][0].any()
    assert all(torch.equal(whole, cut) for whole, cut in zip(*found, strict=True))


NOTHING = [0] * 32


@pytest.mark.parametrize(
    ("tokens", "begins"),
    [
        ("xyabcabcabcz", [2, 5, 8, 11]),
        ("abcabc", [0, 3, 6]),
        ("abaabaab", [0, 3, 6]),  # not the pairs of a
        ("abcdefgh", []),
        ("", []),
        ("abcdefghiijklmnop", []),  # too little
    ],
)
def test_the_repetitions_that_save_most_are_found(tokens: str, begins: list[int]) -> None:
    assert repeats(tokens, NOTHING) == begins


def test_of_places_that_save_as_much_the_one_is_cut_where_the_fewest_values_cross() -> None:
    tokens = "xabcabcabz"  # from the first a, from the b or from the c after it
    assert repeats(tokens, NOTHING) == [1, 4, 7]
    assert repeats(tokens, [9, 9, 9, 9, 9, 1, 9, 9, 9, 9, 9]) == [2, 5, 8]
    assert repeats(tokens, [9, 9, 9, 9, 9, 9, 1, 9, 9, 9, 9]) == [3, 6, 9]
