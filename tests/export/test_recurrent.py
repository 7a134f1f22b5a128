"""The arithmetic of recurrent layers, as it is traced."""

import torch
from torch import Tensor
from trt_spec.export.cache import Places
from trt_spec.export.recurrent import Entries, RecurrentCache

HEADS, SIZE, PENDING = 2, 4, 3


def answered(ancestors: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """What a delta rule that forgets fast says of a call of these [S, S], and the state behind two pending tokens."""
    width, draw = len(ancestors), torch.Generator().manual_seed(seed)
    depths = torch.tensor([[0, 1, 2, 3, 4, 1, 2, 3]])[:, :width]
    places = Places(torch.tensor([7]), depths, ancestors[None], depths)
    entries = Entries(places, torch.arange(PENDING)[None], *(torch.tensor([number]) for number in (2, 2, 8)))
    query, keys, values = (
        torch.nn.functional.normalize(torch.randn(1, HEADS, tokens, SIZE, generator=draw), dim=-1)
        for tokens in (width, PENDING + width, PENDING + width)
    )
    decays = -90 * torch.rand(1, HEADS, PENDING + width, generator=draw)
    rates = torch.rand(1, HEADS, PENDING + width, generator=draw)
    state = torch.randn(1, HEADS, SIZE, SIZE, generator=draw)
    return RecurrentCache(places, entries, {}).attend(query, keys, values, decays, rates, state)


def test_padding_of_a_tree_poisons_nothing_whatever_it_sees() -> None:
    """Beside another row's lines nodes of a row that has none may see a leaf without what comes before it."""
    line = torch.ones(8, 8).tril().bool()
    line[5:, 1:5] = False  # three nodes of another line
    torn = line.clone()
    torn[5] = torch.tensor([1, 0, 0, 0, 1, 1, 0, 0]).bool()
    torn[6:, 4] = True
    (said, state), (beside, same) = answered(line), answered(torn)
    assert beside.isfinite().all()
    assert torch.equal(beside[:, :, :5], said[:, :, :5])
    assert torch.equal(same, state)
