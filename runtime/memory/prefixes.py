"""Blocks of tokens that requests have left, for requests that begin alike.

A block is known by a hash of its tokens, of all before them and of the request's salt. Only whole blocks of committed
tokens are kept. Those of a prompt hold the very bits that reading it again would give. Those of an output were computed
in narrow steps, which engines may round in another way, as they do between batches: only a near tie can tell.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import sha256
from types import MappingProxyType
from typing import NamedTuple, Protocol

from ...engines import BLOCK_TOKENS
from .cache import KVCache

NONE: Mapping[int, bytes] = MappingProxyType({})


class Block(NamedTuple):
    """A block that is kept: its key, that of the block before it, and what it was made of."""

    key: bytes
    parent: bytes | None
    tokens: tuple[int, ...]
    salt: str
    marks: Mapping[int, bytes]  # of those of its tokens that alone do not tell what was read: the digest of an image


class Watcher(Protocol):
    """Learns from the stepping thread which blocks of the target's cache are kept, and must return quickly.

    The block before one that is kept is kept, too.
    """

    def kept(self, blocks: Sequence[Block]) -> None: ...

    def dropped(self, keys: Sequence[bytes]) -> None: ...


class Prefixes:
    """Keeps up to so many blocks of each cache; those go first that were not asked for longest.

    Of a model with states of rows, a chain of blocks ends where its cache has kept what they were. Those before an end
    were asked for no longer ago, so that what led to a dropped one alone is oldest then, and is dropped with it.
    """

    watcher: Watcher | None = None

    def __init__(self, caches: Sequence[KVCache], most_blocks: int) -> None:
        self._most = most_blocks
        self._target = caches[0]
        self._kept: dict[KVCache, OrderedDict[bytes, int]] = {cache: OrderedDict() for cache in caches}
        self.asked_tokens = 0  # of all prompts
        self.found_tokens = 0

    @property
    def blocks(self) -> int:
        return sum(map(len, self._kept.values()))

    def extend(self, keys: list[bytes], tokens: Sequence[int], salt: str, marks: Mapping[int, bytes] = NONE) -> None:
        """Append the keys of the blocks that these tokens fill; `marks` tell those at some places from their likes."""
        if self._most:
            for place in range(len(keys), len(tokens) // BLOCK_TOKENS):
                before = keys[-1] if keys else sha256(salt.encode()).digest()
                block = tokens[place * BLOCK_TOKENS : (place + 1) * BLOCK_TOKENS]
                before += b"".join(_marks_of(place, marks).values())
                keys.append(sha256(before + b"".join(token.to_bytes(4, "little") for token in block)).digest())

    def reuse(self, cache: KVCache, row: int, keys: Sequence[bytes]) -> None:
        """Begin an empty row with the longest chain of kept blocks."""
        kept = self._kept[cache]
        found = []
        for key in keys:
            if key not in kept:
                break
            found.append(key)
        found = found[: cache.worth_keeping(row, [kept[key] for key in found])]
        for key in reversed(found):  # the end of a chain goes first, since it is found by its beginning alone
            kept.move_to_end(key)
        if found:
            cache.reuse(row, [kept[key] for key in found])

    def leave(
        self,
        cache: KVCache,
        row: int,
        keys: Sequence[bytes],
        tokens: Sequence[int],
        salt: str,
        marks: Mapping[int, bytes] = NONE,
    ) -> None:
        """Keep the whole blocks of a row that holds these tokens, as far as they fit."""
        kept = self._kept[cache]
        most = self._most if cache.keeps_blocks else 0
        places = min(len(keys), cache.entries[row] // BLOCK_TOKENS, most)
        places = cache.worth_keeping(row, [kept.get(key) for key in keys[:places]])
        added, dropped = [], []

        def drop_oldest() -> None:
            key, block = kept.popitem(last=False)
            cache.drop(block)
            dropped.append(key)

        for place in reversed(range(places)):
            if keys[place] in kept:
                kept.move_to_end(keys[place])
                continue
            if len(kept) == self._most:
                drop_oldest()
            kept[keys[place]] = cache.keep(row, place)
            added.append(place)
        while kept and not cache.worth_keeping(row, [next(iter(kept.values()))]):  # it led to one that was dropped
            drop_oldest()
        if self.watcher is not None and cache is self._target:
            if dropped:
                self.watcher.dropped(dropped)
            if added:
                self.watcher.kept([block_at(place, keys, tokens, salt, marks) for place in reversed(added)])

    def forget(self) -> None:
        for cache, kept in self._kept.items():
            for block in kept.values():
                cache.drop(block)
            if self.watcher is not None and cache is self._target and kept:
                self.watcher.dropped(list(kept))
            kept.clear()


def block_at(place: int, keys: Sequence[bytes], tokens: Sequence[int], salt: str, marks: Mapping[int, bytes]) -> Block:
    own = tuple(tokens[place * BLOCK_TOKENS : (place + 1) * BLOCK_TOKENS])
    return Block(keys[place], keys[place - 1] if place else None, own, salt, _marks_of(place, marks))


def _marks_of(place: int, marks: Mapping[int, bytes]) -> Mapping[int, bytes]:
    """Return the marks of the tokens of a block, by their places there."""
    if not marks:  # nearly always
        return NONE
    first = place * BLOCK_TOKENS
    return {token: marks[first + token] for token in range(BLOCK_TOKENS) if first + token in marks}
