"""Growing a checkpoint changes its cost and nothing else."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from trt_spec.engines import RequestError
from trt_spec.tools.making.growing import LlamaSize, grow, place_heads

from ...kit.models import tiny_gpt2, tiny_llama

LOGITS = 1e-4  # the sums of the larger shape are rounded in another order, no more


def worst_difference(small: Path, large: Path) -> float:
    ids = torch.randint(0, 60, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits = [
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()(ids).logits
            for path in (small, large)
        ]
    return float((logits[0] - logits[1]).abs().max())


@pytest.mark.parametrize("kv_heads", [4, 8])
def test_grown_checkpoint_computes_the_same_logits(tmp_path: Path, kv_heads: int) -> None:
    small = tiny_llama(tmp_path / "small")
    shape = LlamaSize(hidden=80, layers=4, heads=8, kv_heads=kv_heads, mlp=160)
    parameters = grow(small, tmp_path / "large", shape)
    large = AutoModelForCausalLM.from_pretrained(tmp_path / "large")
    assert parameters == sum(parameter.numel() for parameter in large.parameters())
    assert LlamaSize.of(large.config.to_dict()) == shape
    assert worst_difference(small, tmp_path / "large") < LOGITS
    matrices = [weight for weight in large.state_dict().values() if weight.ndim == 2]
    assert len({weight.numpy().tobytes() for weight in matrices}) == len(
        matrices
    )  # a runtime would keep equal ones once


@pytest.mark.exhaustive
def test_the_demo_target_grown_to_79_million_parameters_computes_the_same_logits(tmp_path: Path) -> None:
    small = Path(__file__).parents[3] / "tools/demo_pair/pycode-14m"
    assert grow(small, tmp_path, LlamaSize(hidden=768, layers=12, heads=12, kv_heads=4, mlp=2048)) > 75_000_000
    assert worst_difference(small, tmp_path) < LOGITS


def test_every_old_head_keeps_the_key_value_head_it_reads() -> None:
    old, new = LlamaSize(64, 2, 6, 2, 128), LlamaSize(128, 2, 12, 6, 128)
    slots, sources = place_heads(old, new)
    assert [sources[slot // 2] for slot in slots] == [head // 3 for head in range(6)]
    assert len(set(slots)) == 6


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        (LlamaSize(16, 4, 8, 4, 160), "hidden 16 is smaller than the source's"),
        (LlamaSize(80, 4, 9, 4, 160), "9 heads are not a multiple of 4 key-value heads"),
    ],
)
def test_impossible_shapes_are_refused(tmp_path: Path, shape: LlamaSize, text: str) -> None:
    with pytest.raises(RequestError, match=text):
        grow(tiny_llama(tmp_path / "small"), tmp_path / "large", shape)
    assert not (tmp_path / "large").exists()


@pytest.mark.parametrize("content", [None, "[]", "[" * 100_000], ids=["missing", "list", "nested"])
def test_what_is_not_a_checkpoint_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(RequestError, match=r"config.json is not a configuration .*; name the folder of a checkpoint"):
        grow(tmp_path, tmp_path / "large", LlamaSize(80, 4, 8, 4, 160))


def test_only_llama_can_be_grown(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="'gpt2' checkpoint, only llama can be grown"):
        grow(tiny_gpt2(tmp_path / "small"), tmp_path / "large", LlamaSize(80, 4, 8, 4, 160))
