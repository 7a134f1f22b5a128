"""What a greedy round on a GPU tells the host: the best tokens, and the logits that it finds NaN in."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from trt_spec.engines import EngineError
from trt_spec.runtime import SamplingParams
from trt_spec.runtime.round.result import RowResult, read_table
from trt_spec.runtime.state.verdict import Verdict

from ..states import make_plan

TYPES = [torch.float32, torch.float16, torch.bfloat16]


def picked(logits: Tensor) -> Verdict:
    verdict = Verdict(logits, told=True)
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
