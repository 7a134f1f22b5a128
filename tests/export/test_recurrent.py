"""Recurrent layers as plain operators: a token that nobody reads may see what it likes."""

import pytest
import torch
from trt_spec.export import recurrent
from trt_spec.export.cache import Places
from trt_spec.export.recurrent import Entries, RecurrentCache

WIDTH, PENDING, HEADS, KEY, VALUE = 6, 2, 2, 4, 3
DECAY = -60.0  # the logarithm of one; of two more there is no number for what they would be worth the other way


@pytest.mark.parametrize("rule", ["delta rule", "delta rule by channel", "Mamba-2"])
def test_a_token_that_sees_no_path_leaves_the_others_as_they_are(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is where a row has fewer branches than its neighbours: nodes of an earlier round stand among others."""
    torch.manual_seed(0)
    monkeypatch.setattr(recurrent, "marked", lambda _, value: value)  # which is zero outside of a trace
    query, keys, values = (
        torch.nn.functional.normalize(torch.randn(1, HEADS, count, size), dim=-1)
        for count, size in ((WIDTH, KEY), (PENDING + WIDTH, KEY), (PENDING + WIDTH, VALUE))
    )
    decays = torch.full((1, HEADS, PENDING + WIDTH, KEY if rule.endswith("by channel") else 1), DECAY)
    rates = None if rule == "Mamba-2" else torch.full((1, HEADS, PENDING + WIDTH), 0.5)
    state, ones = torch.randn(1, HEADS, KEY, VALUE), torch.ones(1, dtype=torch.int64)

    def answered(seen_by_last: list[bool]) -> tuple[torch.Tensor, torch.Tensor]:
        depths = torch.arange(WIDTH)[None]
        ancestors = torch.ones(1, WIDTH, WIDTH, dtype=torch.bool).tril()
        ancestors[0, -1] = torch.tensor(seen_by_last)
        places = Places(ones, depths, ancestors, depths)
        entries = Entries(places, torch.arange(PENDING)[None], 2 * ones, 2 * ones, 0 * ones)
        return RecurrentCache(places, entries, {}).attend(query, keys, values, decays, rates, state)

    line, none = answered([True] * WIDTH), answered([False] * (WIDTH - 2) + [True, True])
    assert line[0].any()
    assert torch.equal(line[1], none[1]), "the state swallows pending tokens alone"
    torch.testing.assert_close(none[0][:, :, :-1], line[0][:, :, :-1])
    assert none[0].isfinite().all()
