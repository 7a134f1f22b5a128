"""Tells the router of NVIDIA Dynamo which prefixes a worker keeps."""

from collections.abc import Sequence
from typing import Any

from ...runtime.memory.prefixes import Block

FIRST = 1_000_000  # of the numbers that Dynamo gives to images, in place of their tokens
BITS = 2**30 - 1  # of a digest, that such a number has


class Publishing:
    """Tells of each block its tokens, of which the router makes its own hashes."""

    def __init__(self, publisher: Any) -> None:
        self._publisher = publisher

    def kept(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._publisher.publish_stored(
                token_ids=tokens_of(block),
                num_block_tokens=[len(block.tokens)],
                block_hashes=[_short(block.key)],
                parent_hash=None if block.parent is None else _short(block.parent),
                cache_salt=block.salt or None,
            )

    def dropped(self, keys: Sequence[bytes]) -> None:
        self._publisher.publish_removed([_short(key) for key in keys])


def tokens_of(block: Block) -> list[int]:
    """Return the tokens of a block, those of an image as numbers of what it shows, so that no router mixes images up.

    The number is made of a digest as Dynamo's workers of vLLM make it of theirs. The digest is our own, so a router
    that hashes images itself does not find such a prefix.
    """
    found = list(block.tokens)
    for place, digest in block.marks.items():
        found[place] = FIRST + (int(digest[:16], 16) & BITS)
    return found


def _short(key: bytes) -> int:
    return int.from_bytes(key[:8], "big", signed=True)
