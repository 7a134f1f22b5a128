"""Recurrent layers stand where they should whatever rounds did: texts are transformers', laws are the draft's own."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from trt_spec.engines import Bundle, Recurrence, Step
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.memory.row_cache import RowCache
from trt_spec.runtime.memory.snapshots import Snapshots
from trt_spec.tools.certificate import rollback
from trt_spec.tools.certificate.effort import QUICK
from trt_spec.tools.certificate.probe import Probes
from trt_spec.tools.certificate.subject import Subject

from ..bundles import export_pair
from ..families import tiny_checkpoint
from ..kit.hybrids import ROWS, every_hybrid, expected_texts, greedy_texts, some_prompts, tiny_hybrid
from ..kit.laws import CLOSE, ENOUGH, VOCAB, compared, room
from ..models import tiny_llama

NOISE = 0.03  # of a draft's weights, in standard deviations


@dataclass(frozen=True)
class Hybrid:
    """A bundle of a recurrent target and a recurrent draft like it, and both in transformers."""

    bundle: Path
    target: Any
    draft: Any
    name: str = "model"

    def features(self, tokens: list[int]) -> torch.Tensor:
        return torch.zeros(len(tokens) - 1, 0)

    def laws(
        self, tokens: list[int], features: torch.Tensor, paths: list[list[int]], committed: int
    ) -> list[torch.Tensor]:
        said = [self.draft(torch.tensor([[*tokens, *path]]), use_cache=False).logits[0, -1] for path in paths]
        return [logits[:VOCAB].softmax(-1) for logits in said]

    @cached_property
    def expected(self) -> list[list[int]]:
        return expected_texts(self.target)


def hybrid(kind: str, folder: Path) -> Hybrid:
    target = tiny_hybrid(kind, folder / "target")
    draft = shutil.copytree(target, folder / "draft")
    noise = torch.Generator().manual_seed(1)
    weights = load_file(draft / "model.safetensors")
    for name, weight in weights.items():
        if weight.dim() > 1:
            weights[name] = weight + NOISE * weight.std() * torch.randn(weight.shape, generator=noise)
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    bundle = export_pair(target, folder / "bundle", draft).bundle
    both = (AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32).eval() for one in (target, draft))
    return Hybrid(bundle, *both)


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Hybrid]:
    made: dict[str, Hybrid] = {}

    def of(kind: str) -> Hybrid:
        if kind not in made:
            made[kind] = hybrid(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return of


CHOICES: list[tuple[str, int | str]] = [
    *(("model", k) for k in (1, 4, 9, "3+3", "4/8", "3x2x1")),
    *(("cascade", k) for k in (3, 5)),
    ("lookup", 3),
    ("none", 0),
    ("model+lookup", 3),
    ("lookup+model", 2),
]


def texts(hybrid: Hybrid, prompts: list[list[int]], seed: int = 0, **options: Any) -> list[list[int]]:
    return greedy_texts(hybrid.bundle, prompts, CHOICES, seed, **options)


@every_hybrid("granitemoehybrid")
def test_a_greedy_text_is_transformers_whatever_rounds_did(hybrids: Callable[[str], Hybrid], kind: str) -> None:
    """In lines, combs and trees, of sources that change, after prefixes were found and places were given up."""
    hybrid, prompts = hybrids(kind), some_prompts()
    assert texts(hybrid, prompts) == hybrid.expected
    assert texts(hybrid, prompts, 1, prefix_bytes=room(hybrid, 3000)) == hybrid.expected
    short = {"cache_bytes": room(hybrid, 500, ROWS), "prefix_bytes": room(hybrid, 800)}
    assert texts(hybrid, prompts, 2, **short) == hybrid.expected


@every_hybrid("granitemoehybrid")
def test_each_proposal_is_drawn_from_the_drafts_law(hybrids: Callable[[str], Hybrid], kind: str) -> None:
    worst, drawn = compared(hybrids(kind), cache_bytes=room(hybrids(kind), 500, ROWS))
    assert drawn > ENOUGH
    assert worst < CLOSE


@pytest.mark.exhaustive
def test_the_torch_engine_writes_the_same_text(hybrids: Callable[[str], Hybrid]) -> None:
    hybrid = hybrids("qwen3_5_text")
    assert texts(hybrid, some_prompts()[:3], engine="torch") == hybrid.expected[:3]


@pytest.mark.exhaustive
def test_models_with_and_without_recurrent_layers_draft_for_each_other(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "initializer_range": 0.3}
    plain = tiny_llama(tmp_path / "plain", VOCAB, **sizes)
    short = tiny_checkpoint("lfm2", tmp_path / "short", initializer_range=0.3)
    delta = tiny_checkpoint("qwen3_next", tmp_path / "delta")
    for target, *drafts in ((plain, short, delta), (delta, plain, short)):
        pair = export_pair(target, tmp_path / f"of {target.name}", drafts)
        prompt = [3, 5, 8, 13]
        settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 24}
        expected = pair.reference.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist()
        params = SamplingParams(max_new_tokens=24, ignore_eos=True)
        with Decoder.open(pair.bundle, max_batch=4) as decoder:
            for drafter in ("model", "model2", "model+model2"):
                for length in (3, "3/6") if "+" not in drafter else (3,):
                    [output] = decoder.generate([prompt], params, drafter=drafter, draft_length=length)
                    assert list(output.token_ids) == expected, (target.name, drafter, length)


def test_after_rounds_of_all_kinds_a_row_holds_what_a_fresh_reading_gives(hybrids: Callable[[str], Hybrid]) -> None:
    """As the certificate asks it, of target and draft, also of rows that have moved."""
    subject = Subject(Bundle.open(hybrids("granitemoehybrid").bundle), "onnxruntime", "cpu", batch=4)
    with Probes(subject) as probes:
        findings = list(rollback.check(subject, probes, QUICK, lambda *_: None))
    assert len(findings) == 4, "two models, alone and in a batch"
    assert all(one.passed for one in findings), [one.detail for one in findings]


# Faults that would show.


def with_one_too_many(self: Recurrence, step: Step, first: int = 0) -> Step:
    """A token that fell is swallowed."""
    found, base = begin(self, step, first), self.base[first : first + len(step.start)]

    def run() -> None:
        base.sub_((base > 0).long())
        found.run()

    return replace(found, run=run)


def not_in_order(
    self: Recurrence, memory: torch.Tensor, start: torch.Tensor, path: torch.Tensor, first: int = 0
) -> None:
    """The path of a tree stays where it was."""


def left_behind(self: RowCache, source: int, destination: int) -> None:
    """States stay where their row was."""
    before = [states.clone() for states in self.memory.rows]
    move(self, source, destination)
    for states, old in zip(self.memory.rows, before, strict=True):
        states[:, destination] = old[:, destination]


def older(self: Snapshots, row: int, block: int) -> None:
    """A row begins with blocks, but as if it had swallowed nothing."""


begin, move = Recurrence.begin, RowCache.move
FAULTS = [
    (Recurrence, "begin", with_one_too_many),
    (Recurrence, "straighten", not_in_order),
    (RowCache, "move", left_behind),
    (Snapshots, "restore", older),
]


@pytest.mark.parametrize(("owner", "name", "fault"), FAULTS, ids=[fault.__name__ for *_, fault in FAULTS])
def test_a_fault_would_show(
    hybrids: Callable[[str], Hybrid], owner: type, name: str, fault: Callable[..., Any]
) -> None:
    hybrid = hybrids("granitemoehybrid")
    with patch.object(owner, name, fault):
        assert texts(hybrid, some_prompts(), 1, prefix_bytes=room(hybrid, 3000)) != hybrid.expected
