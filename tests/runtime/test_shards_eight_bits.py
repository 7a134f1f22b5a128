"""A target in shards keeps its cache in eight bits: each shard the keys and values of its heads, and their scales."""

from pathlib import Path

import pytest
from trt_spec.engines import Bundle
from trt_spec.runtime import Decoder, SamplingParams

from ..kit.bundles import Pair, export_pair, noisy_draft
from ..kit.prompts import REPEATS
from ..kit.shards import in_shards, run_with_a_preemption

PROMPTS = [[5, 9, 17, 5, 9, 20, 33], REPEATS, [8, 2, 44], [5, 9, 17, 5, 9, 20, 33, 12, 13]]
GREEDY = SamplingParams(max_new_tokens=16, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=16, temperature=1, seed=5, top_p=0.9, ignore_eos=True)
CHOICES = [(GREEDY, 3, "model"), (GREEDY, 4, "suffix"), (SAMPLED, "3x2", "model")]
LATER = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("cache", "shards"), [("int8", 2), pytest.param("int8", 4, marks=LATER), pytest.param("fp8", 2, marks=LATER)]
)
def test_texts_are_those_of_one_device(llama: Pair, cache: str, shards: int, tmp_path: Path) -> None:
    """There are more prompts than rows, and one gives up its place; with four shards, two have the same head."""
    alone = export_pair(llama.checkpoint, tmp_path / "alone", cache=cache)
    bundle, said = noisy_draft(alone.bundle, tmp_path / "bundle", noise=0.05), []
    for count in (1, shards):
        in_shards(bundle, tmp_path / str(count), count)
        with Decoder.open(tmp_path / str(count), "torch", max_batch=3, prefix_bytes=2**22) as decoder:
            for params, length, drafter in CHOICES:
                asked = {"draft_length": length, "drafter": drafter}
                requests = [decoder.submit(prompt, params, **asked) for prompt in PROMPTS]
                run_with_a_preemption(decoder)
                said.append([(one.output().token_ids, one.output().speculation.accepted) for one in requests])
    assert said[: len(CHOICES)] == said[len(CHOICES) :]
    assert sum(accepted for _, accepted in said[0]) > 0
    states = Bundle.read(tmp_path / str(shards)).target.contract.states
    assert {(state.name.partition("_")[2].rstrip("_0123456789"), state.shape) for state in states} == {
        ("", (1, 16)),
        ("scale", (1, 1)),
    }
