"""The kernels of attention give each token what it may see, read nothing else, and give it the same bits anywhere."""

import importlib.util
import math
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trt_spec.engines.torch.attending import attention, left_by_sinks, seen_entries
from trt_spec.engines.torch.kernels import attention as operator
from trt_spec.engines.torch.kernels.on_gpu import attention as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OF_AN_OPERATOR = ("test_schema", "test_faketensor")
SMALL = {
    "MOST_ENTRIES": 16,
    "LEAST_PART": 32,
    "MOST_PARTS": 8,
}  # so that a short cache has several parts of several blocks


@dataclass(frozen=True)
class Call:
    """A call of a model: its tokens branch as `shape` says, after a tail of entries that branch as well."""

    starts: tuple[int, ...] = (50,)
    width: int = 1
    shape: str = "line"
    tail: int = 0
    heads: int = 2
    kv_heads: int = 1
    size: int = 16
    value_size: int = 0  # 0 is `size`
    capacity: int = 96
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    seed: int = 0

    def inputs(self) -> dict[str, Any]:
        random = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random).to(self.dtype)

        batch, told = len(self.starts), self.tail + self.width
        parents = [[-1, *(parent_of(self.shape, place, random) for place in range(1, told))] for _ in range(batch)]
        depths, ancestors = (
            torch.zeros(batch, told, dtype=torch.int64),
            torch.eye(told, dtype=torch.bool).repeat(batch, 1, 1),
        )
        for row, place in product(range(batch), range(1, told)):
            if (parent := parents[row][place]) >= 0:
                depths[row, place] = depths[row, parent] + 1
                ancestors[row, place] |= ancestors[row, parent]
        return {
            "query": normal(batch, self.width, self.heads, self.size).transpose(1, 2),
            "key": normal(batch, self.kv_heads, self.capacity, self.size),
            "value": normal(batch, self.kv_heads, self.capacity, self.value_size or self.size),
            "start": torch.tensor(self.starts),
            "depths": depths - self.tail,
            "ancestors": ancestors[:, self.tail :].contiguous(),
            "sinks": normal(self.heads) if self.sinks else None,
            "scale": self.size**-0.5,
            "softcap": self.softcap,
            "window": self.window,
        }


def parent_of(shape: str, place: int, random: torch.Generator) -> int:
    if shape == "line":
        return place - 1
    if shape == "comb":  # a line, and a leaf beside each of its tokens
        return max(0, place - 2 - (place % 2 == 0))
    return int(torch.randint(-1, place, (), generator=random))


def sees(inputs: dict[str, Any]) -> Tensor:
    """Say which entries each token sees, one by one, by the words of the contract [B, 1, S, T]."""
    start, depths, ancestors, window = (inputs[name] for name in ("start", "depths", "ancestors", "window"))
    (batch, width, told), capacity = ancestors.shape, inputs["key"].shape[2]
    found = torch.zeros(batch, 1, width, capacity, dtype=torch.bool)
    for row, token, entry in product(range(batch), range(width), range(capacity)):
        place = entry - int(start[row]) + told - width  # among the entries that the call is told of
        position = int(start[row] + depths[row, told - width + token])
        if place < 0:
            at, seen = entry, True
        elif place < told:
            at, seen = int(start[row] + depths[row, place]), bool(ancestors[row, token, place])
        else:
            continue
        found[row, 0, token, entry] = seen and (not window or position - window < at <= position)
    return found


def expected(inputs: dict[str, Any], mask: Tensor) -> Tensor:
    """Attend in float64 by torch's own operations."""
    query, key, value = (inputs[name].double() for name in ("query", "key", "value"))
    found = attention(query, key, value, mask, inputs["scale"], inputs["softcap"])
    return (
        found * left_by_sinks(query, key, mask, inputs["scale"], inputs["sinks"])
        if inputs["sinks"] is not None
        else found
    )


def poisoned(inputs: dict[str, Any]) -> dict[str, Any]:
    """Write what is no number to all entries that no token of the call may see."""
    unseen = ~sees(inputs).any(2)[:, 0]  # [B, T]
    in_tail = torch.arange(unseen.shape[1]) >= inputs["start"][:, None] - inputs["depths"].shape[1]
    before_or_behind = unseen & (~in_tail | (torch.arange(unseen.shape[1]) >= inputs["start"][:, None]))
    spoilt = before_or_behind[:, None, :, None]
    cache = {"key": inputs["key"].masked_fill(spoilt, math.nan), "value": inputs["value"].masked_fill(spoilt, math.inf)}
    return inputs | cache


def attended(module: ModuleType, inputs: dict[str, Any]) -> Tensor:
    given = [one.to(DEVICE) if isinstance(one, Tensor) else one for one in inputs.values()]
    found: Tensor = module.attention(*given)
    return found.cpu()


def assert_right(module: ModuleType, call: Call) -> None:
    """Over a cache that is garbage wherever nobody may look.

    In float32 a score of a few units carries a few roundings. Else weights and answer are rounded once each, and in
    Triton's interpreter bfloat16 is cut off instead.
    """
    inputs = call.inputs()
    rounding = torch.finfo(call.dtype).eps * (16 if call.dtype == torch.float32 else 2)
    found, right = attended(module, poisoned(inputs)).double(), expected(inputs, sees(inputs))
    torch.testing.assert_close(found, right, rtol=rounding, atol=rounding)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name, number in SMALL.items():
        monkeypatch.setattr(kernels, name, number)
    return kernels


SHOWS_FAULTS = (
    Call((47,), 3, "comb", window=20, heads=4, kv_heads=2, sinks=True),
    Call((47,), 1, softcap=1.0),
)
CALLS = (
    *SHOWS_FAULTS,
    Call((0,)),
    Call((95,), heads=3, size=80),
    Call((91, 0, 40), 2, heads=4, kv_heads=2, dtype=torch.float16),
    Call((3, 64), 5, "comb", heads=1, size=64, dtype=torch.bfloat16),
    Call((33,), 17, "tree", kv_heads=2, size=24),
    Call((60,), heads=8, size=128, softcap=50.0),
    Call((31, 7), 5, "tree", heads=1, window=9),
    Call((79,), 17, "comb", window=40, softcap=2.0),
    Call((70,), 3, "tree", tail=6, window=12),
    Call((40, 20), 2, "comb", tail=7, size=256),
    Call((20,), size=96, value_size=32, dtype=torch.float16),
)


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_each_token_gets_what_it_may_see(small: ModuleType, call: Call) -> None:
    assert_right(small, call)


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", ["line", "comb", "tree"])
@pytest.mark.parametrize("width", [1, 2, 5, 17])
def test_each_token_gets_what_it_may_see_in_every_shape(small: ModuleType, width: int, shape: str) -> None:
    """Each size in each type, and with it by turns what else a model or a call may have."""
    for turn, (size, dtype) in enumerate(product((16, 64, 80, 96, 128, 256), DTYPES)):
        call = Call(
            starts=((0,), (45, 3), (96 - width,))[turn % 3],
            width=width,
            shape=shape,
            heads=(1, 2, 3, 8)[turn % 4],
            size=size,
            window=(0, 0, 0, 7, 30)[turn % 5],
            softcap=(0.0, 0.0, 30.0)[turn // 2 % 3],
            sinks=turn // 2 % 3 == 1,
            dtype=dtype,
            seed=turn,
        )
        assert_right(small, call)


def test_the_parts_that_the_engine_uses_give_what_each_token_may_see() -> None:
    """Of 256 entries each, and of more where the cache is longer than 64 of them."""
    assert_right(kernels, Call((290,), capacity=520))
    assert_right(kernels, Call((17_000,), capacity=17_408, window=40))


@pytest.mark.parametrize("tail", [0, 4])
@pytest.mark.parametrize("window", [0, 5])
def test_the_mask_of_torch_operations_is_what_the_contract_says(tail: int, window: int) -> None:
    for seed in range(5):
        inputs = Call((4, 20), 3, "tree", tail, capacity=30, window=window, seed=seed).inputs()
        found = seen_entries(inputs["start"], inputs["depths"], inputs["ancestors"], 30, window)
        assert torch.equal(found, sees(inputs))


def test_what_is_said_of_the_operator_without_data_is_so() -> None:
    """For a compiler: shapes, strides, and that it writes to none of its arguments."""
    inputs = Call((40, 20), 2, heads=4, kv_heads=2, window=9).inputs()
    torch.library.opcheck(torch.ops.trt_spec.attention.default, tuple(inputs.values()), test_utils=OF_AN_OPERATOR)


# Faults.

FAULTS = {  # what stands in the kernels, and what is planted instead
    "the mask of a call that is the first": (
        "(within < 0)[None, :] | (below != 0)",
        "entry[None, :] <= token[:, None]",
    ),
    "a window that counts entries": ("tl.where(listed, first + depth, entry)", "entry"),
    "a window of the first token for all": ("position[:, None] - WINDOW", "position[:, None] * 0 + first - WINDOW"),
    "one entry too few": ("first + width, capacity), part", "first + width - 1, capacity), part"),
    "one entry too many": ("first + width, capacity), part", "first + width + 1, capacity), part"),
    "parts whose highest scores are forgotten": ("tl.exp(peaks_of - peak)", "tl.where(alive, 1.0, 0.0)"),
    "blocks whose highest scores are forgotten": ("tl.exp(peak - base)", "tl.exp(base - base)"),
    "a cap that is none": ("scores = capped(scores, softcap)", "scores = scores"),
    "sinks that take nothing": ("total += tl.exp(sink - peak)", "total += 0"),
    "heads in another order": ("kv_head * GROUP + row % GROUP", "kv_head + row % GROUP"),
}


@pytest.mark.filterwarnings("ignore:invalid value")  # a fault may read what is no number
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_kernels_is_seen(tmp_path: Path, fault: str) -> None:
    right, wrong = FAULTS[fault]
    text = Path(kernels.__file__).read_text()
    assert text.count(right) == 1
    file = tmp_path / "faulty.py"
    file.write_text(text.replace(right, wrong))
    spec = importlib.util.spec_from_file_location(f"{kernels.__package__}.faulty", file)
    assert spec is not None
    assert spec.loader is not None
    faulty = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(faulty)
    vars(faulty).update(SMALL)
    with pytest.raises(AssertionError, match="not close"):
        all(assert_right(faulty, call) is None for call in SHOWS_FAULTS)


# What is read, and in which order.


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The addresses of each load of the kernels, as Triton's interpreter sees them."""
    from triton.runtime.interpreter import InterpreterBuilder

    load, found = InterpreterBuilder.create_masked_load, []

    def seen(builder: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        found.append(torch.from_numpy(pointers.data[mask.data].astype("int64")))
        return load(builder, pointers, mask, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", seen)
    return found


def entries_of(loads: list[Tensor], cache: Tensor) -> list[set[int]]:
    """Return the entries of a cache of one row and one head that each load read of it."""
    begin, size = cache.data_ptr(), cache.shape[3] * cache.element_size()
    own = [load[(load >= begin) & (load < begin + cache.nbytes)] for load in loads]
    return [set(((load - begin) // size).tolist()) for load in own if len(load)]


@pytest.mark.skipif(DEVICE != "cpu", reason="Triton's interpreter sees addresses, a GPU does not tell")
@pytest.mark.parametrize(
    ("start", "window", "entries"),
    [(0, 0, range(2)), (40, 0, range(42)), (900, 0, range(902)), (900, 50, range(851, 902))],
)
def test_what_is_read_of_a_cache_are_its_live_entries_once_each(
    read: list[Tensor], start: int, window: int, entries: range
) -> None:
    """Whatever its capacity: so time goes with the live length, and with a window's beyond it."""
    inputs = Call((start,), 2, size=64, capacity=1024, window=window).inputs()
    attended(kernels, inputs)
    for name in ("key", "value"):
        loads = entries_of(read, inputs[name])
        assert sorted(one for load in loads for one in load) == list(entries)
        assert len(loads) <= len(entries) // kernels.MOST_ENTRIES + 2


def row_of(inputs: dict[str, Any], row: int, token: int, capacity: int) -> dict[str, Any]:
    """Return a token of a line as a call of its own, alone in its batch, over a cache of this capacity."""
    alone = {name: inputs[name][row : row + 1] for name in ("query", "key", "value", "start")}
    return inputs | {
        "query": alone["query"][:, :, token : token + 1],
        "key": alone["key"][:, :, :capacity],
        "value": alone["value"][:, :, :capacity],
        "start": alone["start"] + token,
        "depths": torch.zeros(1, 1, dtype=torch.int64),
        "ancestors": torch.ones(1, 1, 1, dtype=torch.bool),
    }


@pytest.mark.parametrize("window", [0, 20])
def test_a_token_has_the_same_bits_at_any_width_in_any_batch_over_any_capacity(small: ModuleType, window: int) -> None:
    inputs = Call((3, 60, 50), 5, window=window).inputs()
    together = attended(small, inputs)
    for row, token in ((0, 0), (1, 2), (2, 4)):
        alone = attended(small, row_of(inputs, row, token, capacity=70))
        assert torch.equal(alone[0, :, 0], together[row, :, token])


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_has_the_same_bits_in_blocks_as_the_engine_uses_them(dtype: torch.dtype, size: int) -> None:
    inputs = Call((3, 300, 250), 5, heads=8, kv_heads=2, size=size, capacity=640, dtype=dtype).inputs()
    together = attended(kernels, inputs)
    for row, token in product(range(3), range(5)):
        alone = attended(kernels, row_of(inputs, row, token, capacity=512))
        assert torch.equal(alone[0, :, 0], together[row, :, token])


def test_the_memory_of_parts_is_bounded_and_rows_keep_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 rows of 17 tokens over 16,384 entries would take 1.1 GB; rows attend one after the other instead."""
    query = torch.empty(64, 32, 17, 128, dtype=torch.bfloat16, device="meta")
    value = torch.empty(64, 8, 16384, 128, dtype=torch.bfloat16, device="meta")
    of_a_row = 4 * 32 * 17 * 64 * (128 + 2)
    assert 1 < operator.rows_together(query, value) == (128 << 20) // of_a_row
    inputs = Call((3, 300, 250), 2, heads=4, kv_heads=2, capacity=320).inputs()
    monkeypatch.setattr(operator, "_attention", lambda *given: calls.append(len(given[0])) or kernels.attention(*given))
    scale = {name: inputs.pop(name) for name in ("scale", "softcap", "window")}
    found, calls = list[Tensor](), list[int]()
    for most, expected in ((128 << 20, [3]), (2 * 4 * 4 * 2 * 2 * (16 + 2), [2, 1]), (1, [1, 1, 1])):
        calls.clear()
        monkeypatch.setattr(operator, "MOST_BYTES", most)
        found.append(operator.attention(**inputs, **scale))
        assert calls == expected
        assert found[-1].transpose(1, 2).is_contiguous(), "the next product reads it without a copy"
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


class Made(TorchDispatchMode):
    """Counts the bytes of what is made."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if str(func).startswith(("aten.new_empty", "aten.empty")):
            self.bytes.append(found.nbytes)
        return found


@pytest.mark.parametrize(("rows", "width", "capacity"), [(3, 5, 640), (2, 1, 300), (1, 65, 2000)])
def test_the_memory_that_is_told_is_that_of_the_parts(rows: int, width: int, capacity: int) -> None:
    inputs = Call((capacity // 2,) * rows, width, heads=4, kv_heads=2, capacity=capacity).inputs()
    with Made() as made:
        kernels.attention(*inputs.values())
    parts, answer = sum(made.bytes), 4 * inputs["query"].numel()
    told = operator._bytes_of_a_row(4, width, capacity, 16)
    assert parts - answer == rows * told <= operator.most_bytes(rows, 4, capacity, 16)


def test_no_more_than_the_bound_is_told_and_a_row_that_takes_more_alone() -> None:
    assert 100 << 20 < operator.most_bytes(64, 32, 16384, 128) <= 128 << 20
    alone = 4 * 128 * 65 * 64 * (128 + 2)
    assert operator.most_bytes(64, 128, 16384, 128) == alone > 128 << 20


def test_parts_of_another_length_would_change_bits(small: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Call((60,), size=64).inputs()
    before = attended(small, inputs)
    monkeypatch.setattr(small, "LEAST_PART", 48)
    assert not torch.equal(attended(small, inputs), before)
