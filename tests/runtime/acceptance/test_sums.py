"""What is drawn does not depend on how sums are made: a GPU adds in blocks, where a sum may fall by its last bit."""

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from trt_spec.runtime import SamplingParams
from trt_spec.runtime.acceptance.block_verification import passes
from trt_spec.runtime.acceptance.filters.top_p import TopP
from trt_spec.runtime.acceptance.seat import make_rows
from trt_spec.runtime.acceptance.sums import inverse_cdf, rising_sums
from trt_spec.runtime.state import place

from ...kit.sums import adding_in_blocks, one_by_one

VOCAB = 257
BLOCKS = [1, 2, 3, 7, 8, 16, 31, 32, 64, 128]
LEAST, MOST = 2.0**-49, 1 - 2.0**-49  # uniforms lie between these


@pytest.fixture(params=BLOCKS)
def blocks(request: pytest.FixtureRequest) -> Iterator[int]:
    with adding_in_blocks(request.param):
        yield request.param


def some_weights(rows: int = 40, seed: int = 0) -> Tensor:
    """Weights of all sizes, many of them zero, also at either end."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(rows, VOCAB, generator=generator, dtype=torch.float64).pow(8).softmax(-1)
    weights *= torch.rand(rows, VOCAB, generator=generator) < torch.linspace(0.02, 1, rows)[:, None]
    weights[::3, :40] = 0
    weights[::2, -70:] = 0
    weights[:, 100] = 0.25
    return weights


@pytest.mark.parametrize("blocks", [1, 7, 32], indirect=True)
def test_sums_made_in_blocks_do_fall_and_do_rise_where_nothing_is_added(blocks: int) -> None:
    """So that what follows is tested by something."""
    weights = some_weights()
    steps = weights.cumsum(-1, dtype=torch.float64).diff(dim=-1)[weights[:, 1:] == 0]
    assert bool((steps > 0).any())
    assert bool((steps < 0).any())


def test_sums_never_fall_and_rise_with_tokens_of_some_weight_alone(blocks: int) -> None:
    weights = some_weights()
    found = rising_sums(weights, torch.float64)
    steps = found.diff(dim=-1)
    assert bool((steps >= 0).all())
    assert bool((steps[weights[:, 1:] == 0] == 0).all())
    assert bool((found[weights.cumsum(-1) == 0] == 0).all())
    torch.testing.assert_close(found, one_by_one(weights, -1, dtype=torch.float64), rtol=1e-14, atol=0)


def test_no_token_without_weight_is_drawn_and_the_same_one_as_by_other_sums(blocks: int) -> None:
    weights = some_weights()
    exact = one_by_one(weights, -1, dtype=torch.float64)
    borders = (exact / exact[:, -1:]).flatten()  # uniforms at which the token changes, and their neighbours
    generator = torch.Generator().manual_seed(1)
    u = torch.cat([borders, torch.rand(10_000, dtype=torch.float64, generator=generator), torch.tensor([LEAST, MOST])])
    u = torch.cat([u, u.nextafter(torch.zeros(())), u.nextafter(torch.ones(()))]).clamp(LEAST, MOST)
    row = torch.arange(len(u)) % len(weights)
    row[: len(borders)] = torch.arange(len(borders)) // VOCAB
    drawn = torch.cat(
        [inverse_cdf(weights[r], each[:, None]) for r, each in zip(row.split(4096), u.split(4096), strict=True)]
    )
    assert bool((weights[row].gather(1, drawn) > 0).all())
    low = torch.where(drawn > 0, exact[row].gather(1, (drawn - 1).clamp(min=0)), 0.0)
    high, x = exact[row].gather(1, drawn), u[:, None] * exact[row, -1:]
    near = 1e-14 * exact[row, -1:]
    assert bool(((low <= x + near) & (x <= high + near)).all()), "another token only where u lies at a border"


@pytest.mark.parametrize("weights", [[0.0] * 4, [float("nan")] * 4, [0.5, float("nan"), 0.5, 0.0]])
def test_where_there_is_nothing_to_draw_the_token_lies_beyond_the_vocabulary(blocks: int, weights: list[float]) -> None:
    """There it is noticed: a model has given no numbers."""
    assert inverse_cdf(torch.tensor([weights]), torch.tensor([[0.999]], dtype=torch.float64)).tolist() == [[4]]


def test_top_p_keeps_the_same_tokens_by_sums_made_in_any_blocks(blocks: int) -> None:
    params = [SamplingParams(temperature=1.0, top_p=each) for each in (0.01, 0.5, 0.9, 0.999999)]
    rows = make_rows(len(params), 16, VOCAB, 1, "cpu")
    top_p = TopP()
    for row, one in enumerate(params):
        top_p.admit(rows.columns, row, one, [1], VOCAB)
    generator = torch.Generator().manual_seed(2)
    ordered = torch.randn(len(params), 3, VOCAB, generator=generator).mul(3).sort(-1).values
    ordered[:, :, :50] = -torch.inf  # already left out
    found = top_p.threshold(ordered, ordered, rows.columns)
    with patch.object(Tensor, "cumsum", one_by_one), patch.object(place, "HOSTS", {"cpu"}):
        assert torch.equal(found, top_p.threshold(ordered, ordered, rows.columns))


def test_uniforms_that_were_never_made_let_nothing_stand_that_the_target_excludes() -> None:
    """As of a row that has ended in the round before: u is never 0, at which a proposal of probability 0 would pass."""
    u = make_rows(2, 16, 8, 1, "cpu").uniforms
    assert bool(((u > 0) & (u < 1)).all())
    excluded, rest = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    assert not passes(torch.tensor([LEAST], dtype=torch.float64), excluded, rest)
    assert bool(passes(torch.zeros(1, dtype=torch.float64), excluded, rest)), "so 0 must not come"
