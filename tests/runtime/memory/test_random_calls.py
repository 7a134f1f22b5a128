"""Whatever calls a cache gets, each row holds what was written into it, and kept blocks what they held."""

import random
from dataclasses import dataclass, field, replace

import pytest
import torch
from trt_spec.engines import BLOCK_TOKENS, RECURRENT, ROW, SOURCE, SOURCES, TOKEN, WIDEST_STEP, WINDOW, Contract, State
from trt_spec.runtime.memory.block_cache import BlockCache
from trt_spec.runtime.memory.cache import KVCache
from trt_spec.runtime.memory.row_cache import RowCache

ROWS, LONGEST, KEPT, LONGEST_SOURCE = 6, 400, 9, 200
SEEDS, CALLS = 1, 120
EVERY = 4 * BLOCK_TOKENS  # tokens, after which states are copied while a prompt is read
KEYS = (State("key_0", (2, 4), "float32"), State("value_0", (2, 6), "bfloat16"))
EIGHT_BITS = (State("key_0", (2, 4), "int8"), State("key_scale_0", (2, 1), "float16"))
SUMMARY, SLOTTED = State("summary", (3,), "float32", ROW), State("inputs_0", (1, 2), "float32", WINDOW)
READ = State("source_key_0", (2, 4), "float32", SOURCE)
ROWWISE = Contract(1, 2, KEYS, vocab_size=8, max_length=LONGEST, dtype="float32")
CONTRACTS = {
    "rows": ROWWISE,
    "rows of full capacity": ROWWISE,
    "blocks": ROWWISE.with_blocks(),
    "eight bits": replace(ROWWISE, states=EIGHT_BITS),
    "eight bits in blocks": replace(ROWWISE, states=EIGHT_BITS).with_blocks(),
    "states of rows": replace(ROWWISE, states=(*KEYS, SUMMARY)),
    "recurrent": replace(ROWWISE, states=(*KEYS, SUMMARY, SLOTTED), capabilities=(RECURRENT,)),
    "recurrent alone": Contract(
        0, 0, (SUMMARY, SLOTTED), vocab_size=8, max_length=LONGEST, dtype="float32", capabilities=(RECURRENT,)
    ),
    "sources": replace(ROWWISE, states=(*KEYS, READ), capabilities=(SOURCES,)),
}


def cache_of(kind: str) -> KVCache:
    contract = CONTRACTS[kind]
    if contract.in_blocks:
        return BlockCache(contract, "cpu", ROWS, LONGEST, kept_blocks=KEPT)
    if kind == "rows of full capacity":
        return RowCache(contract, "cpu", ROWS, ROWS, LONGEST, fixed=True, kept_blocks=KEPT)
    return RowCache(contract, "cpu", ROWS, kept_blocks=KEPT, longest_source=LONGEST_SOURCE)


@dataclass
class Held:
    """What a row should hold: a number for each entry, for its state, for each slot and for its source."""

    entries: list[int] = field(default_factory=list)
    least: int = 0  # no call begins before: a state has absorbed these entries, or other rows may begin with them
    state: int = 0
    slots: list[int] = field(default_factory=list)  # of both halves, one after the other
    later: bool = False  # whether its slots begin with the second half
    source: list[int] = field(default_factory=list)
    ends: dict[int, int] = field(default_factory=dict)  # the state after so many tokens


class Driver:
    """Does the same to a cache and to a list of what its rows should hold."""

    def __init__(self, kind: str, seed: int) -> None:
        self.cache, self.choose = cache_of(kind), random.Random(seed)
        self.contract = self.cache.contract
        self.rows = [Held() for _ in range(ROWS)]
        self.chains: list[tuple[list[int], Held]] = []  # what kept blocks hold, from the first of a row on

    def step(self) -> None:
        """Do something, and see that steps over memory that has moved are void."""
        before, version = self.addresses(), self.cache.version
        self.choose.choice(
            [
                *(3 * [self.write]),
                self.free,
                self.move,
                self.swap,
                self.keep,
                self.restore,
                self.drop,
                self.fit,
                self.read,
            ]
        )()
        assert self.cache.version != version or self.addresses() == before

    def addresses(self) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in self.cache.everything.items()}

    def numbers(self, count: int) -> list[int]:
        return [self.choose.randint(1, 100) for _ in range(count)]

    def some(self, live: bool) -> int | None:
        found = [row for row, held in enumerate(self.rows) if bool(held.entries) == live]
        return self.choose.choice(found) if found else None

    def write(self) -> None:
        """Make a call over a few rows, padded to the widest, so that it leaves garbage after what others hold."""
        first = self.choose.randrange(ROWS)
        rows = range(first, min(ROWS, first + self.choose.randint(1, 3)))
        starts = [
            self.choose.randint(max(one.least, len(one.entries) - 9), len(one.entries))
            for one in self.rows[first : rows.stop]
        ]
        most = min(self.choose.choice([1, 5, 17, 150]), LONGEST - max(starts))
        if most < 1:
            return
        widths = [self.choose.randint(1, most) for _ in rows]
        self.cache.make_room(first, starts, widths)
        for row, start, width in zip(rows, starts, widths, strict=True):
            numbers = self.numbers(width)
            self.fill(row, start, numbers + [101] * (max(widths) - width))
            self.rows[row].entries[start:] = numbers
            self.note(row, start)

    def fill(self, row: int, start: int, numbers: list[int]) -> None:
        """Write each number into an entry of every state of tokens, as an engine does."""
        given, places = self.cache.tensors(row, 1), torch.arange(start, start + len(numbers))
        for at, state in enumerate(self.contract.of_kind(TOKEN)):
            own, values = given[state.name], (torch.tensor(numbers) + at).to(getattr(torch, state.dtype))
            if self.contract.in_blocks:
                blocks = self.cache.everything["blocks"][row, places // BLOCK_TOKENS].long()
                own[blocks, :, places % BLOCK_TOKENS] = values[:, None, None]
            else:
                own[0][:, places] = values[None, :, None]

    def note(self, row: int, start: int) -> None:
        """Let the row's state absorb what it may, and tell the cache."""
        held, absorbed, places = self.rows[row], None, self.cache.recurrence
        if places is not None:
            absorbed = self.choose.choice([start, len(held.entries)])
            if start < EVERY <= absorbed:  # as a prompt is read
                del held.entries[EVERY:]
                absorbed = EVERY
            held.later, held.slots = self.choose.random() < 0.5, self.numbers(2 * self.cache.half)
            places.base[row], places.slot[row] = absorbed, self.cache.half * held.later
            for state in self.contract.of_kind(WINDOW):
                self.cache.buffers[state.name][row] = torch.tensor(held.slots)[None, :, None]
        for state in self.contract.of_kind(ROW):
            held.least = start if absorbed is None else absorbed
            held.state = held.ends.setdefault(held.least, *self.numbers(1))
            self.cache.buffers[state.name][row] = held.state
        self.cache.wrote(row, start, len(held.entries), absorbed)

    def free(self) -> None:
        row = self.choose.randrange(ROWS)
        self.cache.free(row)
        self.rows[row] = Held()

    def move(self) -> None:
        source = self.choose.randrange(1, ROWS)
        destination = self.choose.randrange(source)
        self.cache.move(source, destination)
        self.rows[destination], self.rows[source] = self.rows[source], Held()

    def swap(self) -> None:
        one, other = self.choose.sample(range(ROWS), 2)
        self.cache.make_room_to_swap(one, other)
        self.cache.swap(one, other)
        self.rows[one], self.rows[other] = self.rows[other], self.rows[one]

    def keep(self) -> None:
        row, left = self.some(live=True), KEPT - sum(len(blocks) for blocks, _ in self.chains)
        if row is None or not self.cache.keeps_blocks:
            return
        held = self.rows[row]
        count = self.cache.worth_keeping(row, [None] * min(len(held.entries) // BLOCK_TOKENS, left))
        if count:
            blocks, end = [self.cache.keep(row, place) for place in range(count)], count * BLOCK_TOKENS
            held.least = max(held.least, end)
            self.chains.append((blocks, Held(held.entries[:end], end, held.ends.get(end, 0))))

    def restore(self) -> None:
        row = self.some(live=False)
        if row is not None and self.chains:
            blocks, kept = self.choose.choice(self.chains)
            self.cache.reuse(row, blocks)
            ends = {kept.least: kept.state}
            self.rows[row] = replace(kept, entries=kept.entries.copy(), ends=ends, source=self.rows[row].source)

    def drop(self) -> None:
        if self.chains:
            blocks, _ = self.chains.pop(self.choose.randrange(len(self.chains)))
            for block in blocks:
                self.cache.drop(block)

    def fit(self) -> None:
        """Let buffers grow, or shrink as far as what is held allows."""
        rows, capacity = self.choose.randint(1, ROWS), self.choose.randint(1, LONGEST)
        self.cache.make_room(rows - 1, [0], [capacity])
        if self.cache.recurrence is not None:
            self.cache.make_slots(self.choose.choice([1, WIDEST_STEP]))

    def read(self) -> None:
        """Let a row read a source."""
        if self.cache.sources is not None:
            row = self.choose.randrange(ROWS)
            numbers = self.rows[row].source = self.numbers(self.choose.randint(1, LONGEST_SOURCE))
            self.cache.sources.put(row, [torch.tensor(numbers)[None, :, None].expand(2, -1, 4).float()])

    def require(self) -> None:
        assert self.cache.entries == [len(held.entries) for held in self.rows]
        for row, held in enumerate(self.rows):
            count = len(held.entries)
            for at, state in enumerate(self.contract.of_kind(TOKEN) if count else ()):
                found = self.cache.read(row, state.name)[:, :count].float()
                assert torch.equal(found, torch.tensor(held.entries)[None, :, None].float().add(at).expand_as(found))
            for state in self.contract.of_kind(ROW):
                assert (self.cache.buffers[state.name][row : row + 1] == held.state).all()
            for state in self.contract.of_kind(WINDOW) if held.slots else ():
                halves = zip(
                    self.cache.buffers[state.name][row, 0, :, 0].chunk(2),
                    torch.tensor(held.slots).chunk(2),
                    strict=True,
                )
                for found, wanted in halves:
                    least = min(len(found), len(wanted))
                    assert torch.equal(found[:least], wanted[:least].float())
            if self.cache.recurrence is not None and count:
                places = int(self.cache.recurrence.base[row]), int(self.cache.recurrence.slot[row])
                assert places == (held.least, self.cache.half * held.later)
            if self.cache.sources is not None:
                given = self.cache.everything
                assert int(given["source_length"][row]) == len(held.source)
                if held.source:
                    found = given[READ.name][row, :, : len(held.source)]
                    assert torch.equal(found, torch.tensor(held.source).float()[None, :, None].expand_as(found))


@pytest.mark.parametrize("kind", CONTRACTS)
def test_rows_and_kept_blocks_hold_what_was_written(kind: str) -> None:
    for seed in range(SEEDS):
        driver = Driver(kind, seed)
        for _ in range(CALLS):
            driver.step()
            driver.require()
        driver.cache.clear()
        while driver.chains:
            driver.drop()
        assert driver.cache.kept_bytes == 0
        if isinstance(driver.cache, BlockCache):
            assert driver.cache.pool.used == 0
