"""What is fused when the engine torch opens a graph, how often, and that it changes no number."""

import pytest
from trt_spec.engines import Bundle, open_engine
from trt_spec.engines.torch import TorchEngine

FIRED = {  # in two layers
    "llama": {"gates": 2},
    "gpt2": {"gates": 0},
    "gemma2": {"gates": 2},
}


@pytest.mark.parametrize("family", FIRED)
def test_each_row_fires_as_often_as_its_nodes_stand_in_the_graph(pairs, family: str) -> None:
    bundle = Bundle.open(pairs(family).bundle)
    engine = open_engine("torch", bundle.graph("target"), bundle.target.contract)
    assert isinstance(engine, TorchEngine)
    assert engine.fused == FIRED[family]
