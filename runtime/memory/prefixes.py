"""Blocks of tokens that requests have left behind, for requests that begin alike.

A block is known by a hash of its tokens, of all before them and of the request's salt. Only whole blocks of committed
tokens are kept. Those of a prompt hold the very bits that reading it again would give. Those of an output were computed
in narrow steps, which engines may round in another way, as they do between batches: only a near tie can tell.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256

from ...engines import BLOCK_TOKENS
from .cache import KVCache


class Prefixes:
    """Keeps up to so many blocks of each cache; those go first that were not asked for longest."""

    def __init__(self, caches: Sequence[KVCache], most_blocks: int) -> None:
        self._most = most_blocks
        self._kept: dict[KVCache, OrderedDict[bytes, int]] = {cache: OrderedDict() for cache in caches}
        self.asked_tokens = 0  # of all prompts
        self.found_tokens = 0

    @property
    def blocks(self) -> int:
        return sum(map(len, self._kept.values()))

    def extend(self, keys: list[bytes], tokens: Sequence[int], salt: str) -> None:
        """Append the keys of the blocks that these tokens fill."""
        if self._most:
            for place in range(len(keys), len(tokens) // BLOCK_TOKENS):
                before = keys[-1] if keys else sha256(salt.encode()).digest()
                block = tokens[place * BLOCK_TOKENS : (place + 1) * BLOCK_TOKENS]
                keys.append(sha256(before + b"".join(token.to_bytes(4, "little") for token in block)).digest())

    def reuse(self, cache: KVCache, row: int, keys: Sequence[bytes]) -> None:
        """Begin an empty row with the longest chain of kept blocks."""
        kept = self._kept[cache]
        found = []
        for key in keys:
            if key not in kept:
                break
            found.append(key)
        for key in reversed(found):  # the end of a chain goes first, since it is found by its beginning alone
            kept.move_to_end(key)
        if found:
            cache.reuse(row, [kept[key] for key in found])

    def leave(self, cache: KVCache, row: int, keys: Sequence[bytes]) -> None:
        """Keep the whole blocks of a row, as far as they fit."""
        kept = self._kept[cache]
        places = min(len(keys), cache.entries[row] // BLOCK_TOKENS, self._most)
        for place in reversed(range(places)):
            if keys[place] in kept:
                kept.move_to_end(keys[place])
                continue
            if len(kept) == self._most:
                cache.drop(kept.popitem(last=False)[1])
            kept[keys[place]] = cache.keep(row, place)

    def forget(self) -> None:
        for cache, kept in self._kept.items():
            for block in kept.values():
                cache.drop(block)
            kept.clear()
