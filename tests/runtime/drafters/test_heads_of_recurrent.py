"""Heads of targets with recurrent layers read what these have made of each token, however its states came about."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from trt_spec.runtime.memory.features import Features
from trt_spec.runtime.memory.row_cache import RowCache

from ...kit.distributions import CHOICES, CLOSE, ENOUGH, FAR, compared, room
from ...kit.headed import Headed, in_a_bundle
from ...kit.heads import dflash_head, eagle3_head, with_mtp_of_qwen
from ...kit.hybrids import ROWS, SHARED, every_hybrid, expected_texts, greedy_texts, some_prompts, tiny_hybrid

MASK = 70  # that no text has


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Headed]]:
    """Targets with a head that reads its own states and one that reads masks: Qwen3.5 has the former in its files."""
    made: dict[str, dict[str, Headed]] = {}

    def of(kind: str) -> dict[str, Headed]:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            target = tiny_hybrid(kind, folder / "target", vocab_size=72)
            if kind == "qwen3_5_text":
                heads = {"mtp": with_mtp_of_qwen(target, mtp_num_hidden_layers=1)}
            else:
                fields = {"norm_before_residual": False, "norm_output": False}
                heads = {"eagle3": eagle3_head(folder / "eagle3", target, scale=0.25, **fields)}
            heads["dflash"] = dflash_head(folder / "dflash", target, "authors", mask=MASK, scale=0.2)
            made[kind] = in_a_bundle(folder / "bundle", target, heads)
        return made[kind]

    return of


def memory(headed: Headed, which: str) -> dict[str, Any]:
    if which == "prefixes":
        return {"prefix_bytes": room(headed, 3000)}
    return {"cache_bytes": room(headed, 500, ROWS), "prefix_bytes": room(headed, 800)}


@every_hybrid("qwen3_5_text")
def test_each_proposal_is_drawn_from_the_heads_distribution_over_the_targets_features(
    hybrids: Callable[[str], dict[str, Headed]], kind: str
) -> None:
    """In lines and trees, beside copies, after rounds without it, after a found prefix that ends at a snapshot."""
    for headed, which in zip(hybrids(kind).values(), ("prefixes", "short"), strict=True):
        worst, drawn = compared(headed, shared=SHARED, **memory(headed, which))
        assert drawn > ENOUGH
        assert worst < CLOSE, headed.name


@every_hybrid("qwen3_5_text")
def test_a_greedy_text_is_transformers_whatever_rounds_did(
    hybrids: Callable[[str], dict[str, Headed]], kind: str
) -> None:
    expected = expected_texts(next(iter(hybrids(kind).values())).target)
    for headed, which in zip(hybrids(kind).values(), ("short", "prefixes"), strict=True):
        choices = [(drafter.replace("head", headed.name), length) for drafter, length in CHOICES]
        found = greedy_texts(headed.bundle, some_prompts(), choices, **memory(headed, which))
        assert found == expected


def late(self: Features, given: Any, first_row: int, start: Any) -> Callable[[], None]:
    return into(self, given, first_row, start + 1)


def features_left_behind(self: RowCache, row: int, blocks: Any) -> None:
    """What is found again has no features."""
    reuse(self, row, blocks)
    if "features" in self.buffers:
        self.buffers["features"][row, :, : self.entries[row]] = 0


into, reuse = Features.into, RowCache.reuse


@pytest.mark.parametrize(
    ("owner", "method", "fault"), [(Features, "into", late), (RowCache, "reuse", features_left_behind)]
)
def test_what_a_head_reads_wrongly_would_show(
    hybrids: Callable[[str], dict[str, Headed]], owner: type, method: str, fault: Callable[..., Any]
) -> None:
    headed = hybrids("qwen3_5_text")["dflash"]
    with patch.object(owner, method, fault):
        worst, _ = compared(headed, shared=SHARED, far=FAR, **memory(headed, "prefixes"))
    assert worst > FAR
