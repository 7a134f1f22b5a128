"""What Dynamo's router is told of kept prefixes; that it listens is tested in the tier `replicas`."""

from typing import Any

import pytest
from trt_spec.engines import BLOCK_TOKENS
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.memory.prefixes import Block
from trt_spec.tools.dynamo import events
from trt_spec.tools.dynamo.events import Hashes, Publishing, tokens_of

from ...kit.seeing_models import IMAGE_TOKEN, Seeing, image, tokenizer


class Router:
    """Knows chains of blocks by the tokens that it is told, as Dynamo's does, and nothing else of them."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    def publish_stored(self, *, token_ids: list[int], block_hashes: list[int], parent_hash: Any, **_: Any) -> None:
        self.known[block_hashes[0]] = parent_hash, tuple(token_ids)

    def publish_removed(self, hashes: list[int]) -> None:
        for one in hashes:
            del self.known[one]

    def chains(self) -> set[tuple[int, ...]]:
        return {self._chain(one) for one in self.known}

    def _chain(self, one: int | None) -> tuple[int, ...]:
        return () if one is None else self._chain(self.known[one][0]) + self.known[one][1]


def test_prompts_with_the_same_tokens_and_other_images_are_told_apart(llava: Seeing):
    """And those with the same images are not, so that the router sends them where their prefix is."""
    prompt = f"{llava.placeholder} and then {llava.placeholder}{'y' * 70}"
    one, other = image(30, 20, 0), image(30, 20, 1)
    router, params = Router(), SamplingParams(max_new_tokens=2)
    told, cached = [], []
    with Decoder.open(llava.bundle, prefix_bytes=1 << 24) as decoder:
        decoder.prefixes.watcher = Publishing(router, Hashes())
        for images in ([one, one], [one, other], [other, one], [one, one]):
            before = router.chains()
            output = decoder.generate(prompt, params, images=[images])[0]
            told.append(router.chains() - before)
            cached.append(output.usage.cached_tokens)
        chains, known = router.chains(), len(router.known)
    blocks = len(llava.ids(prompt, llava.read([one, one]))) // BLOCK_TOKENS
    assert [len(new) for new in told] == [blocks, blocks - cached[1] // BLOCK_TOKENS, blocks, 0]
    assert cached[0] == cached[2] == 0
    assert len(chains) == known > 2 * blocks, "no two blocks are one to the router"
    soft = tokenizer().token_to_id(IMAGE_TOKEN["llava"])
    assert not any(soft in chain for chain in chains), "its token says nothing of an image"


def test_the_number_of_an_image_is_dynamos_own():
    """1,000,000 and the low 30 bits of the hash that it sent, else of the first 64 of our digest."""
    digest, hashes = b"0123456789abcdef" + b"f" * 48, Hashes()
    block = Block(b"", None, (5, 6, 7), "", {1: digest})
    assert tokens_of(block, hashes) == [5, 1_000_000 + 0x9ABCDEF, 7]
    hashes.note([digest.decode()], [2**40 + 3, 4])
    assert tokens_of(block, hashes) == [5, 1_000_000 + 0x9ABCDEF, 7], "which of both it is was not said"
    hashes.note([digest.decode()], [2**40 + 3])
    assert tokens_of(block, hashes) == [5, 1_000_003, 7]
    digest = b"00000000ffffffff" + b"0" * 48
    assert tokens_of(Block(b"", None, (5,), "", {0: digest}), hashes) == [1_000_000 + 2**30 - 1]


def test_hashes_that_came_last_are_remembered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(events, "MOST_NUMBERS", 2)
    hashes = Hashes()
    hashes.note(["1a", "1b"], [100, 200])
    hashes.note(["1a"], [300])
    hashes.note(["1c"], [400])
    assert [hashes.of(name) for name in (b"1a", b"1b", b"1c")] == [300, 0x1B, 400]
