"""Whatever rounds did, recurrent layers are right: texts are transformers', distributions the draft's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trt_spec.engines import SLOTS, Bundle
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.memory.full import CacheFull
from trt_spec.runtime.memory.model import Model
from trt_spec.tools.certificate.probe import Probes
from trt_spec.tools.certificate.state_faults import STATE_FAULTS, state_fault
from trt_spec.tools.certificate.subject import Subject
from trt_spec.tools.measuring.time_reading import reading_ms

from ..kit.bundles import export_pair
from ..kit.distributions import CLOSE, ENOUGH, VOCAB, compared, room
from ..kit.families import tiny_checkpoint
from ..kit.hybrids import ROWS, Hybrid, every_hybrid, greedy_texts, some_prompts
from ..kit.models import tiny_llama
from ..kit.prompts import random_prompts

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
    """In lines, combs and trees, of drafters that change, after prefixes were found and places were given up."""
    hybrid, prompts = hybrids(kind), some_prompts()
    assert texts(hybrid, prompts) == hybrid.expected
    assert texts(hybrid, prompts, 1, prefix_bytes=room(hybrid, 3000)) == hybrid.expected
    short = {"cache_bytes": room(hybrid, 500, ROWS), "prefix_bytes": room(hybrid, 800)}
    assert texts(hybrid, prompts, 2, **short) == hybrid.expected


@every_hybrid("granitemoehybrid")
def test_each_proposal_is_drawn_from_the_drafts_distribution(hybrids: Callable[[str], Hybrid], kind: str) -> None:
    worst, drawn = compared(hybrids(kind), cache_bytes=room(hybrids(kind), 500, ROWS))
    assert drawn > ENOUGH
    assert worst < CLOSE


@every_hybrid("granitemoehybrid")
def test_prompts_are_read_together_and_no_padding_is_absorbed(
    hybrids: Callable[[str], Hybrid], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that end in one part of a call or in another have the states and logits that they have alone."""
    read, calls = Model.prefill, []

    def watched(self: Model, rows: list[int], tokens: list[torch.Tensor]) -> torch.Tensor:
        calls.append([len(each) for each in tokens])
        return read(self, rows, tokens)

    hybrid, lengths = hybrids(kind), [9, 8, 70, 58, 60, 64, 100, 100]
    prompts = random_prompts(VOCAB, lengths, seed=4)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    with Decoder.open(hybrid.bundle, max_batch=len(prompts)) as decoder:
        target = decoder.target
        monkeypatch.setattr(Model, "prefill", watched)
        together = decoder.generate(prompts, params, draft_length=3)
        for one in ([9, 8], [70, 58, 60], [8, 7]):
            assert one in calls, "the last by the draft"
        with decoder.between_rounds():
            for rows in (range(1, 4), range(4, 6)):
                some = [torch.tensor(prompts[row + 1]) for row in rows]
                target.cache.clear()
                found = target.prefill([*rows], some).clone()
                states = [memory.clone() for memory in target.cache.memory.rows]
                for row, prompt, logits in zip(rows, some, found, strict=True):
                    target.cache.clear()
                    assert torch.allclose(target.prefill([row], [prompt])[0], logits, atol=CLOSE)
                    for alone, beside in zip(target.cache.memory.rows, states, strict=True):
                        apart = alone[:, row] - beside[:, row]
                        assert apart.abs().max() < CLOSE * beside[:, row].abs().max()  # decays are summed otherwise
        alone = [decoder.generate([prompt], params, draft_length=0)[0] for prompt in prompts]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]


def test_a_request_alone_ends_when_its_rounds_become_too_wide_for_the_memory(hybrids: Callable[[str], Hybrid]) -> None:
    hybrid = hybrids("granitemoehybrid")
    with Decoder.open(hybrid.bundle, max_batch=1, cache_bytes=room(hybrid, 150, 1)) as decoder:
        params = SamplingParams(max_new_tokens=40, ignore_eos=True)
        request = decoder.submit(some_prompts()[0], params, drafter="model", draft_length=3)
        for _ in range(3):
            decoder.step()
        request.draft(16, "model")
        while decoder.step():
            pass
        assert isinstance(request.error, CacheFull)
        assert "no room for rounds of 17 tokens" in str(request.error)


@pytest.mark.parametrize("kind", ["granitemoehybrid", pytest.param("mamba2", marks=pytest.mark.exhaustive)])
def test_caches_take_no_more_than_their_budget_however_wide_rounds_become(
    hybrids: Callable[[str], Hybrid], kind: str
) -> None:
    hybrid, wide = hybrids(kind), (2, 4, 16, "6/24")
    budget = room(hybrid, 1200, len(wide))
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    with Decoder.open(hybrid.bundle, max_batch=len(wide), cache_bytes=budget) as decoder:
        cache, lengths = decoder.target.cache, range(32, 2000, 32)
        widest, before = 0, [cache.holds([length]) for length in lengths]
        requests = [
            decoder.submit(prompt, params, drafter="model", draft_length=length)
            for prompt, length in zip(some_prompts(), 2 * wide, strict=True)
        ]
        while decoder.step():
            states = [each for model in (decoder.target, *decoder.drafts) for each in model.cache.memory]
            assert sum(one.nbytes for each in states for one in each) <= budget
            widest = max(widest, cache.half)
        assert widest > SLOTS
        assert cache.half < SLOTS, "wide rounds that are over take nothing from later requests"
        assert [cache.holds([length]) for length in lengths] == before
    assert [request.token_ids for request in requests] == hybrid.expected


def test_as_many_requests_fit_as_the_rounds_that_they_ask_for_leave_room_for(
    hybrids: Callable[[str], Hybrid],
) -> None:
    hybrid, params, together = hybrids("granitemoehybrid"), SamplingParams(max_new_tokens=30, ignore_eos=True), {}
    for length in (3, 16):
        with Decoder.open(hybrid.bundle, max_batch=ROWS, cache_bytes=room(hybrid, 500, ROWS)) as decoder:
            requests = [decoder.submit(prompt, params, draft_length=length) for prompt in some_prompts()[:ROWS]]
            together[length] = 0
            while decoder.step():
                together[length] = max(together[length], len(decoder.live))
        assert [request.token_ids for request in requests] == hybrid.expected[:ROWS]
    assert together[3] == ROWS > together[16]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["qwen3_5_text", "mamba2", "zamba2"])
def test_the_torch_engine_writes_the_same_text(hybrids: Callable[[str], Hybrid], kind: str) -> None:
    hybrid = hybrids(kind)
    assert texts(hybrid, some_prompts()[:3], engine="torch") == hybrid.expected[:3]


@pytest.mark.exhaustive
def test_a_model_that_never_attends_is_read_before_it_is_asked(hybrids: Callable[[str], Hybrid]) -> None:
    hybrid, prompt = hybrids("mamba2"), some_prompts()[4]
    with Probes(Subject(Bundle.open(hybrid.bundle), "onnxruntime", "cpu", batch=1)) as probes:
        expected = hybrid.target(torch.tensor([prompt]), use_cache=False).logits[0, -1, :VOCAB]
        assert torch.allclose(probes["target"].logits(prompt), expected, atol=CLOSE)
    with Decoder.open(hybrid.bundle, max_batch=1) as decoder:
        assert reading_ms(decoder, decoder.drafts[0]) != (0.0, 0.0)


@pytest.mark.exhaustive
def test_models_with_and_without_recurrent_layers_draft_for_each_other(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "initializer_range": 0.3}
    plain = tiny_llama(tmp_path / "plain", VOCAB, **sizes)
    short = tiny_checkpoint("lfm2", tmp_path / "short", initializer_range=0.3)
    delta = tiny_checkpoint("qwen3_next", tmp_path / "delta")
    alone = tiny_checkpoint("mamba2", tmp_path / "alone")  # no layer attends
    for target, *drafts in ((plain, short, delta), (delta, plain, short), (plain, alone, delta), (alone, plain, short)):
        pair = export_pair(target, tmp_path / f"of {target.name} by {drafts[0].name}", drafts)
        prompt = [3, 5, 8, 13]
        settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 24}
        expected = pair.reference.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist()
        params = SamplingParams(max_new_tokens=24, ignore_eos=True)
        with Decoder.open(pair.bundle, max_batch=4) as decoder:
            for drafter in ("model", "model2", "model+model2"):
                for length in (3, "3/6") if "+" not in drafter else (3,):
                    [output] = decoder.generate([prompt], params, drafter=drafter, draft_length=length)
                    assert list(output.token_ids) == expected, (target.name, drafter, length)


@pytest.mark.parametrize("name", STATE_FAULTS)
def test_a_fault_would_show(hybrids: Callable[[str], Hybrid], name: str) -> None:
    hybrid = hybrids("granitemoehybrid")
    with state_fault(name) as changed:
        assert texts(hybrid, some_prompts(), 1, prefix_bytes=room(hybrid, 3000)) != hybrid.expected
    assert changed
