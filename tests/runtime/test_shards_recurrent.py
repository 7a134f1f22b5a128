"""Recurrent layers in shards say what they say in one, bit for bit, whatever rounds did, and are split by heads."""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from trt_spec.engines import ROW, WINDOW, Bundle
from trt_spec.runtime import Decoder, SamplingParams

from ..kit.distributions import room
from ..kit.hybrids import ROWS, greedy_texts, hybrid, some_prompts
from ..kit.shards import in_shards

CHOICES: list[tuple[str, int | str]] = [("model", 3), ("model", "3+3"), ("model", "3x2x1"), ("lookup", 3), ("none", 0)]
SETTINGS: dict[str, dict[str, Any]] = {"kimi_linear": {"linear_num_heads": 4}, "mamba2": {"n_groups": 1}}
SAMPLED = [SamplingParams(max_new_tokens=20, temperature=1, top_p=0.9, seed=seed, ignore_eos=True) for seed in range(4)]


def sampled_texts(bundle: Path, length: int | str) -> list[tuple[int, ...]]:
    with Decoder.open(bundle, "torch", max_batch=ROWS) as decoder:
        outputs = decoder.generate(some_prompts()[2:6], SAMPLED, draft_length=length, drafter="model")
    assert sum(output.speculation.accepted for output in outputs) > 0
    return [output.token_ids for output in outputs]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["kimi_linear", "mamba2", "minimax", "qwen3_5_text"])
def test_recurrent_layers_in_shards_say_what_they_say_in_one(kind: str, tmp_path: Path) -> None:
    """In lines, combs and trees, where rows give up their places and prefixes are found again."""
    made, said, kept = hybrid(kind, tmp_path, **SETTINGS.get(kind, {})), [], []
    for shards in (1, 2):
        in_shards(made.bundle, tmp_path / str(shards), shards)
        split = replace(made, bundle=tmp_path / str(shards))
        states = Bundle.read(split.bundle).target.contract.states
        kept.append({state.name: prod(state.shape) for state in states if state.kind in (ROW, WINDOW)})
        short = {"cache_bytes": room(split, 700, ROWS), "prefix_bytes": room(split, 800)}
        texts = greedy_texts(split.bundle, some_prompts()[2:6], CHOICES, engine="torch", **short)
        said.append((texts, sampled_texts(split.bundle, "3x2")))
    assert said[0] == said[1]
    for name, size in kept[0].items():
        assert kept[1][name] == size / 2 if name.startswith("state_") else kept[1][name] < size
