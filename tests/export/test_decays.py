"""Decays are exact in float32: what transformers computes in float64, along every path of a tree."""

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers.models.kimi_linear import modeling_kimi_linear as modeling
from trt_spec.export.checking.scenarios import line_of, paths_of, random_tree
from trt_spec.export.tracing import recurrent
from trt_spec.export.tracing.cache import Places
from trt_spec.export.tracing.decays import PIECE
from trt_spec.export.tracing.entries import Entries
from trt_spec.export.tracing.recurrent import RecurrentCache

HEADS, KEY, VALUE = 2, PIECE + 8, 6  # more channels than weights are made of at once
PENDING, FOLD = 3, 2
CLOSE = 2e-6  # of the largest number, in float32
LOGARITHMS = {
    "weak": lambda *sizes: -0.1 * torch.rand(sizes),
    "strong": lambda *sizes: -100 * torch.rand(sizes),
    "of all sizes": lambda *sizes: -torch.exp(4 * torch.randn(sizes)),  # of some more is forgotten than numbers can say
    "strong, then weak": lambda *sizes: torch.where(torch.arange(sizes[2])[:, None] < 5, -999.9, -torch.rand(sizes)),
}


class Double:
    """What transformers takes for torch; it asks for float32 by name."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def along(path: list[int], state: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return what transformers answers at the end of each token on the way [B, H, S, dv], and the state after it."""
    query, keys, values, decays, rates = (each[:, :, path].double().transpose(1, 2) for each in inputs)
    decays = decays.expand(keys.shape)
    answers, after = modeling.recurrent_kimi_delta_attention(
        query * KEY**0.5, keys, values, decays, rates, initial_state=state.double(), output_final_state=True
    )
    return answers.transpose(1, 2), after


@pytest.mark.parametrize("alike", [False, True], ids=["keys", "one key"])
@pytest.mark.parametrize("channels", [1, KEY], ids=["a head", "a channel"])
@pytest.mark.parametrize("kind", LOGARITHMS)
@pytest.mark.parametrize("parents", [line_of(1), line_of(61), random_tree(Random(1), 17, 6)[0]], ids=len)
def test_decays_of_heads_and_of_channels_are_exact_along_every_path(
    parents: list[int], kind: str, channels: int, alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(recurrent, "marked", lambda _, value: value)  # which is zero outside of a trace
    width, every = len(parents), PENDING + len(parents)
    query, keys = (normalize(torch.randn(1, HEADS, every, KEY), dim=-1) for _ in range(2))
    if alike:
        keys = keys[:, :, :1].expand_as(keys)
    inputs = (query, keys, torch.randn(1, HEADS, every, VALUE), LOGARITHMS[kind](1, HEADS, every, channels))
    rates, state = torch.rand(1, HEADS, every), torch.randn(1, HEADS, KEY, VALUE)
    paths = paths_of(parents)
    ancestors = torch.tensor([[[node in path for node in range(width)] for path in paths]])
    depths, count = torch.tensor([[len(path) - 1 for path in paths]]), torch.tensor([PENDING])
    places = Places(count, depths, ancestors, depths)
    entries = Entries(places, torch.arange(PENDING)[None], count, torch.tensor([FOLD]), 0 * count)
    cache = RecurrentCache(places, entries, {})
    answers, after = cache.attend(query[:, :, PENDING:], *inputs[1:], rates, state)

    monkeypatch.setattr(modeling, "torch", Double())
    expected = torch.zeros(1, HEADS, width, VALUE, dtype=torch.float64)
    before = list(range(PENDING))
    for path in paths:
        said, _ = along([*before, *(PENDING + node for node in path)], state, *inputs, rates)
        expected[:, :, path[-1]] = said[:, :, -1]
    _, folded = along(before[:FOLD], state, *inputs, rates)
    assert folded.dtype == expected.dtype == torch.float64
    for found, wanted in ((answers, expected), (after, folded)):
        assert (found - wanted).abs().max() < CLOSE * wanted.abs().max()
