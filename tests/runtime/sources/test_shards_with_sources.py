"""A decoder in shards says of its sources what it says whole: the first device reads them, and each shard its heads."""

from pathlib import Path

import pytest
from trt_spec.engines import Bundle
from trt_spec.runtime import Decoder, SamplingParams

from ...kit.shards import in_shards, run_with_a_preemption
from ...kit.source_models import example_sources, said_by_transformers

LATER = pytest.mark.exhaustive
TOKENS = 16
GREEDY = SamplingParams(max_new_tokens=TOKENS, min_tokens=TOKENS, temperature=0)
SAMPLED = SamplingParams(max_new_tokens=TOKENS, min_tokens=TOKENS, temperature=0.8, seed=4)
CHOICES = [(GREEDY, 0, "none"), (GREEDY, 3, "model"), (SAMPLED, "3x2", "model")]
KINDS = ["t5", pytest.param("whisper", marks=LATER)]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_of_one_device(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """There are more sources than rows, of unlike lengths, and one row gives up its place."""
    bundle = request.getfixturevalue(kind)
    sources, said = example_sources(kind, 5), []
    for shards in (1, 2):
        in_shards(bundle, tmp_path / str(shards), shards)
        with Decoder.open(tmp_path / str(shards), "torch", max_batch=3) as decoder:
            for params, length, drafter in CHOICES:
                requests = [
                    decoder.submit(source=source, params=params, draft_length=length, drafter=drafter)
                    for source in sources
                ]
                run_with_a_preemption(decoder)
                said.append([list(one.output().token_ids) for one in requests])
    assert said[: len(CHOICES)] == said[len(CHOICES) :]
    assert said[0] == said_by_transformers(kind, bundle.parent / "target", sources, TOKENS)
    assert len(set(map(tuple, said[0]))) > 1
    heads = {state.name: state.shape[0] for state in Bundle.read(tmp_path / "2").target.contract.states}
    assert heads["cross_key_0"] == heads["key_0"] == 2
