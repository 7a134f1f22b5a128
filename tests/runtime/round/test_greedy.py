"""What a greedy round on a GPU tells the host: the best tokens, and the logits that it finds NaN in."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from trt_spec.engines import Bundle, EngineError
from trt_spec.engines.torch import TorchEngine
from trt_spec.runtime import SamplingParams
from trt_spec.runtime.acceptance.filters import FILTERS
from trt_spec.runtime.round.result import RowResult, read_table
from trt_spec.runtime.state import frame
from trt_spec.runtime.state.frame import Frame
from trt_spec.runtime.state.verdict import Verdict

from ...kit.bundles import Pair, export_pair
from ...kit.replaying import replaying
from ...kit.rounds import GREEDY, LLAMA, NUMBERS, SAMPLED, Said, Scene, texts
from ..states import make_plan
from .kinds import idle_models, plan_of

TYPES = [torch.float32, torch.float16, torch.bfloat16]


def picked(logits: Tensor) -> Verdict:
    verdict = Verdict(logits, reads_best=True)
    verdict.winners.pick(logits, None)
    return verdict


@pytest.mark.parametrize("dtype", TYPES)
def test_the_best_token_is_that_of_the_widened_logits_and_ties_go_to_the_lowest_id(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 5, 3001, generator=generator).to(dtype)
    best = logits.amax(-1, keepdim=True)
    logits[:2, :, 700::500] = best[:2]
    expected = torch.from_numpy(logits.float().numpy().argmax(-1))
    assert (expected[:2] <= 700).all()
    assert torch.equal(picked(logits).tokens, expected)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_are_found_where_the_next_token_of_a_live_row_comes_from(
    dtype: torch.dtype, wrong: float
) -> None:
    """Row 1 has NaN at its first token, row 2 behind its next one; -inf stands for a row without any other logit."""
    logits = torch.zeros(3, 3, 9, dtype=dtype)
    logits[..., 4] = 1
    for row, place in ((1, 0), (2, 2)):
        logits[row, place, (slice(None) if wrong == -math.inf else 6)] = wrong
    plan, verdict = make_plan([SamplingParams()] * 3, 2), picked(logits)
    verdict.proposed.fill_(2)

    def read(accepted: Sequence[int], rows: Sequence[int]) -> list[RowResult]:
        verdict.accepted.copy_(torch.tensor(accepted))
        return read_table(verdict.table, plan, dtype, rows)

    assert [one.tokens for one in read([2, 1, 1], [0, 2])] == [[4, 4, 4], [4, 4]]
    for accepted, row in (([0, 0, 0], 1), ([2, 2, 2], 2)):
        with pytest.raises(EngineError, match="the models' logits are NaN or infinite"):
            read(accepted, [0, row])
        assert [one.tokens[-1] for one in read(accepted, [0])] == [4]


@pytest.mark.parametrize("kind", ["plain", "greedy", "lookup", "coupled", "lenient", "coupled comb"])
def test_only_greedy_rounds_of_lines_take_logits_in_the_type_of_the_model(llama: Pair, kind: str) -> None:
    bundle = Bundle.open(llama.bundle)
    target, _, drafters = idle_models(bundle, "meta", max_batch=4)
    target.engine.logits_dtype = "bfloat16"
    plan = plan_of(kind, drafters)
    narrow = kind in ("plain", "greedy")
    assert Frame(plan, target).target_logits.dtype == (torch.bfloat16 if narrow else torch.float32)
    told = (replace(plan, logprobs=1), replace(plan, filters=(FILTERS[0],)), replace(plan, traced=True))
    assert {Frame(one, target).target_logits.dtype for one in told} == {torch.float32}
    assert Frame(plan, target, prefilled=True).target_logits.dtype == torch.float32


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_greedy_rounds_leave_logits_in_the_type_of_the_model_and_write_the_same_texts(
    llama: Pair, tmp_path: Path, dtype: str
) -> None:
    bundle = export_pair(llama.checkpoint, tmp_path / "bundle", dtype=dtype).bundle
    scene = Scene(LLAMA, [("lookup", 2)], GREEDY, NUMBERS[:2], [6, 12])

    def said(scene: Scene) -> tuple[list[Said], set[torch.dtype]]:
        """Return the texts, and the types of the logits of rounds."""
        seen = set()

        class Seen(Verdict):
            def __init__(self, logits: Tensor, length: int, *, reads_best: bool) -> None:
                super().__init__(logits, length, reads_best=reads_best)
                seen.add(logits.dtype)

        with replaying(), patch.object(frame, "Verdict", Seen):
            return texts(scene, bundle, "torch"), seen

    found, seen = said(scene)
    assert seen == {torch.float32, getattr(torch, dtype)}, "those of prompts are widened"
    assert said(replace(scene, params=SAMPLED))[1] == {torch.float32}
    with patch.object(TorchEngine, "logits_dtype", property(lambda self: "float32", lambda self, value: None)):
        widened, seen = said(scene)
    assert seen == {torch.float32}
    assert found == widened
