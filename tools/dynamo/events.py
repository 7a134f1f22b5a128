"""Tells the router of NVIDIA Dynamo which prefixes a worker keeps."""

from collections.abc import Sequence
from typing import Any

from ...runtime.memory.prefixes import Block

FIRST = 1_000_000  # of the numbers that Dynamo gives to images, in place of their tokens
BITS = 2**30 - 1  # of a hash, that such a number has
MOST_NUMBERS = 10_000  # that are remembered


class Hashes:
    """The router's hashes of images, by our digests: those that came last."""

    def __init__(self) -> None:
        self._known: dict[bytes, int] = {}

    def note(self, digests: Sequence[str], hashes: Sequence[int]) -> None:
        """Remember what a request says of its images, if it says it of each."""
        if len(digests) != len(hashes):
            return
        for digest, one in zip(digests, hashes, strict=True):
            self._known.pop(digest.encode(), None)
            self._known[digest.encode()] = one
        while len(self._known) > MOST_NUMBERS:
            del self._known[next(iter(self._known))]

    def of(self, digest: bytes) -> int:
        """Return an image's hash, which is made of our digest where the router has none."""
        return self._known.get(digest, int(digest[:16], 16))


class Publishing:
    """Tells of each block its tokens, of which the router makes its own hashes."""

    def __init__(self, publisher: Any, hashes: Hashes) -> None:
        self._publisher, self._hashes = publisher, hashes

    def kept(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._publisher.publish_stored(
                token_ids=tokens_of(block, self._hashes),
                num_block_tokens=[len(block.tokens)],
                block_hashes=[_short(block.key)],
                parent_hash=None if block.parent is None else _short(block.parent),
                cache_salt=block.salt or None,
            )

    def dropped(self, keys: Sequence[bytes]) -> None:
        self._publisher.publish_removed([_short(key) for key in keys])


def tokens_of(block: Block, hashes: Hashes) -> list[int]:
    """Return the tokens of a block, those of an image as Dynamo's number of it, so that no router mixes images up."""
    found = list(block.tokens)
    for place, digest in block.marks.items():
        found[place] = FIRST + (hashes.of(digest) & BITS)
    return found


def _short(key: bytes) -> int:
    return int.from_bytes(key[:8], "big", signed=True)
