"""Entries of an accepted path follow one another, those of beams lie as these were ordered, and no others move."""

import torch
from trt_spec.engines import Contract, keys_and_values
from trt_spec.runtime.memory.row_cache import RowCache

CONTRACT = Contract(2, 1, keys_and_values(2, 2, 4, "float32"), vocab_size=8, max_length=256, dtype="float32")
STARTS = [3, 61, 30]
PATHS = [[0, 1, 5, 0], [0, 4, 0, 0], [0, 1, 2, 6]]  # after the last node: 0


def test_the_path_lies_in_order_and_what_is_around_it_stays():
    cache = RowCache(CONTRACT, "cpu", 3)
    cache.make_room(0, STARTS, [7] * 3)
    [memory] = cache.memory.tokens
    memory.copy_(torch.randn(memory.shape, generator=torch.manual_seed(0)))
    before = {(row, name): cache.read(row, name).clone() for row in range(3) for name in CONTRACT.cache_names}
    cache.straighten(torch.tensor(STARTS), torch.tensor(PATHS))
    for (row, name), old in before.items():
        new, start = cache.read(row, name), STARTS[row]
        assert torch.equal(new[:, :start], old[:, :start])
        assert torch.equal(new[:, start : start + 4], old[:, [start + node for node in PATHS[row]]])
        assert torch.equal(new[:, start + 4 :], old[:, start + 4 :])


def test_entries_of_one_row_are_ordered_anew_from_where_beams_begin():
    cache = RowCache(CONTRACT, "cpu", 3)
    cache.make_room(0, STARTS, [7] * 3)
    [memory] = cache.memory.tokens
    memory.copy_(torch.randn(memory.shape, generator=torch.manual_seed(0)))
    before = memory.clone()
    cache.reorder(1, 61, [4, 0, 0])
    before[:, 1, :, 61:64] = before[:, 1][:, :, [65, 61, 61]]
    assert torch.equal(memory, before)
