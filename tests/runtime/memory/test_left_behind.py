"""What rounds and requests leave behind is freed at once: Python's search for garbage may come an hour later."""

import gc
from typing import Any

import pytest
from torch import Tensor
from trt_spec.runtime import Decoder, SamplingParams

from ...kit.bundles import Pair
from ...kit.prompts import random_prompts

PROMPTS = random_prompts(64, [5, 30, 1], seed=3)


@pytest.fixture
def garbage():
    """What only a search for garbage would have found."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)

    def found() -> list[Any]:
        gc.collect()
        return gc.garbage

    yield found
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


@pytest.mark.parametrize(
    ("drafter", "draft_length", "settings"),
    [
        ("model", 4, {"temperature": 1.0}),
        ("model", "3/8", {}),
        ("model+lookup", 3, {}),
        ("model", 3, {"num_beams": 3}),
    ],
)
def test_no_cache_and_no_logits_wait_for_a_search_for_garbage(
    llama: Pair, garbage, drafter: str, draft_length: object, settings: dict
):
    params = SamplingParams(max_new_tokens=150, ignore_eos=True, seed=1, **settings)
    with Decoder.open(llama.bundle, max_batch=3, prefix_bytes=2**20) as decoder:
        for _ in range(2):
            moved = decoder.target.cache.version
            decoder.generate(PROMPTS, params, draft_length=draft_length, drafter=drafter)
            assert decoder.target.cache.version > moved, "its buffers grew with the texts, or shrank"
        assert [one for one in garbage() if isinstance(one, Tensor)] == []
