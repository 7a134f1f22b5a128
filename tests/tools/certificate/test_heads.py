"""A bundle with heads is certified as any other, and faults of heads fail it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from trt_spec.runtime.drafters.head import Head
from trt_spec.runtime.memory.features import Features
from trt_spec.runtime.memory.model import Model
from trt_spec.runtime.memory.row_cache import RowCache
from trt_spec.runtime.round import round as round_
from trt_spec.runtime.round.propose import propose
from trt_spec.tools.certificate import checkpoint, distribution
from trt_spec.tools.certificate.effort import QUICK
from trt_spec.tools.certificate.first_tokens import Case
from trt_spec.tools.certificate.probe import Probes

from ...kit.bundles import Pair, export_pair
from ...kit.findings import findings
from ...kit.heads import dflash_head, eagle3_head, parallel_heads
from ...kit.models import tiny_llama


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("headed")
    target = tiny_llama(folder / "target", initializer_range=0.2, num_hidden_layers=3)
    heads = [
        eagle3_head(folder / "eagle3", target, 48, scale=0.25),
        parallel_heads(folder / "medusa", target, "medusa", scale=0.2),
    ]
    return export_pair(target, folder / "bundle", heads)


@contextmanager
def late_in_rounds() -> Iterator[None]:
    """The steps of rounds are given features an entry late; what they are compared with reads as it should."""
    into, prepare, preparing = Features.into, Head.prepare, [False]

    def late(self: Features, given: torch.Tensor, first_row: int, start: torch.Tensor) -> Callable[[], None]:
        return into(self, given, first_row, start + 1 if preparing[0] else start)

    def prepared(self: Head, *given: Any) -> Any:
        preparing[0] = True
        try:
            return prepare(self, *given)
        finally:
            preparing[0] = False

    with patch.object(Features, "into", late), patch.object(Head, "prepare", prepared):
        yield


def left_behind(self: RowCache, start: torch.Tensor, path: torch.Tensor) -> None:
    """Where a sibling stands its keys and values move, and the features stay those of the node that fell."""
    kept = self.buffers["features"].clone() if "features" in self.buffers else None
    straighten(self, start, path)
    if kept is not None:
        self.buffers["features"].copy_(kept)


straighten = RowCache.straighten
FAULTS = {  # and in which model's cache they are seen
    "features an entry late": (late_in_rounds, "eagle3"),
    "own states left where features belong": (
        lambda: patch.object(Model, "reads_again", property(lambda self: False)),
        "eagle3",
    ),
    "features of a node that fell": (lambda: patch.object(RowCache, "straighten", left_behind), "target"),
}


def test_a_target_that_keeps_features_is_compared_with_its_checkpoint(
    headed: Pair, subject_of: Callable[..., Any]
) -> None:
    subject = subject_of(headed)
    with Probes(subject) as probes:
        found = list(checkpoint.check(subject, headed.checkpoint, probes, QUICK, lambda *_: None))
    assert {one.case for one in found} == {"greedy text of transformers", "logits"}
    assert all(one.passed for one in found), [one.detail for one in found]


def test_what_heads_keep_is_what_reading_again_gives(headed: Pair, subject_of: Callable[..., Any]) -> None:
    found = {one.case: one for one in findings("rollback", subject_of(headed, batch=4))}
    assert {case.partition(",")[0] for case in found} == {"target", "eagle3", "medusa"}
    assert all(one.passed for one in found.values()), [one.detail for one in found.values() if not one.passed]


@pytest.mark.parametrize("name", FAULTS)
def test_wrong_features_are_seen_in_what_heads_keep(headed: Pair, subject_of: Callable[..., Any], name: str) -> None:
    subject = subject_of(headed, batch=4)
    plant, seen_in = FAULTS[name]
    with plant():
        failed = [one.case for one in findings("rollback", subject) if not one.passed]
    assert any(case.startswith(seen_in) for case in failed)


def by_another_place(rows: Any, plan: Any, *rest: Any) -> Any:
    """Each token of a block is judged by the distribution of the place before it, as if that had drawn it."""
    proposal = propose(rows, plan, *rest)
    q = proposal.probabilities
    return proposal if q is None else proposal._replace(probabilities=q.roll(1, 1))


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Heads whose tokens are those of a block, on a target of so few tokens that all first ones can be counted."""
    folder = tmp_path_factory.mktemp("blocks")
    target = tiny_llama(folder / "target", vocab=8, padded_vocab=9, num_hidden_layers=3, initializer_range=0.25)
    heads = [
        dflash_head(folder / name, target, draft_vocab=8, size=4, mask=8, scale=0.5, **fields)
        for name, fields in (("dflash", {"sample_from_anchor": True}), ("dspark", {"rank": 4}))
    ]
    return export_pair(target, folder / "bundle", heads)


@pytest.mark.parametrize("drafter", ["dflash", "dspark"])
@pytest.mark.parametrize("faulty", [False, True])
def test_a_token_of_a_block_that_is_judged_by_the_distribution_of_another_is_seen_in_the_distribution(
    blocks: Pair, subject_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, drafter: str, faulty: bool
) -> None:
    every = distribution.list_cases

    def of_blocks(*of: Any) -> list[Case]:
        first = next(case for case in every(*of) if case.drafter == drafter and case.rule == "rejection")
        return [replace(first, draft_length=3)]

    monkeypatch.setattr(distribution, "list_cases", of_blocks)
    with patch.object(round_, "propose", by_another_place) if faulty else nullcontext():
        found = next(findings("distribution", subject_of(blocks)))
    assert found.passed is not faulty, found.detail


@pytest.mark.exhaustive
@pytest.mark.parametrize("check", ["same text", "semantics", "distribution"])
def test_a_bundle_with_heads_is_certified(headed: Pair, subject_of: Callable[..., Any], check: str) -> None:
    failed = [one for one in findings(check, subject_of(headed, batch=4)) if one.passed is False]
    assert not failed, [(one.case, one.detail) for one in failed]
