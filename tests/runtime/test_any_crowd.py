"""A request with a seed has one text: alone, and in any crowd that comes, goes and gives up its places at random."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from trt_spec.export import export_bundle
from trt_spec.runtime import Decoder, Request, SamplingParams

from ..kit.bundles import Pair
from ..kit.headed import Headed
from ..kit.heads import eagle3_head, mtp_head, parallel_heads
from ..kit.hybrids import Hybrid
from ..kit.seeing_models import Seeing, image, seeing
from ..kit.shards import give_up_a_place

pytestmark = pytest.mark.exhaustive
CROWDS = 12
VOCAB = 64
LINES, SHAPES = (0, 1, 2, 3, 5, 8), ("3+4", "3/9", "2+2", "5/7")
FILTERS: tuple[dict[str, Any], ...] = ({}, {}, {"top_p": 0.9}, {"top_k": 20}, {"repetition_penalty": 1.2})


@dataclass(frozen=True)
class Ask:
    prompt: Any
    params: SamplingParams
    more: dict[str, Any]

    def of(self, decoder: Decoder) -> Request:
        return decoder.submit(self.prompt, self.params, **self.more)


def some_asks(
    choose: random.Random, growing: Sequence[str], others: Sequence[str], prompt: Callable[[], Any]
) -> Iterator[Ask]:
    """Make a few requests; drafters that are `growing` may grow trees."""
    for _ in range(choose.randrange(2, 7)):
        params = SamplingParams(
            max_new_tokens=choose.randrange(1, 50),
            temperature=choose.choice((0, 0.7, 1, 1.3)),
            rule=choose.choice(("rejection", "tokenwise", "coupled")),
            seed=choose.randrange(1000),
            ignore_eos=True,
            **choose.choice(FILTERS),
        )
        drafter = choose.choice((*growing, *others))
        length = choose.choice((*LINES, *SHAPES) if drafter in growing else LINES)
        given, images = prompt()
        yield Ask(given, params, {"drafter": drafter, "draft_length": length, "images": images})


def said(decoder: Decoder, asks: Sequence[Ask], choose: random.Random | None = None) -> list[list[int]]:
    """Return what is said; with a choice of chance some come late, in any order, and some give up their places."""
    requests: dict[int, Request] = {}
    waiting = list(range(len(asks)))
    if choose is not None:
        choose.shuffle(waiting)
    while decoder.step() or waiting:
        while waiting and (choose is None or choose.random() < 0.4):
            number = waiting.pop()
            requests[number] = asks[number].of(decoder)
        crowded = len(decoder._scheduler.seating.occupants) > 1
        if choose is not None and crowded and choose.random() < 0.08:
            give_up_a_place(decoder)
    return [list(requests[number].output().token_ids) for number in range(len(asks))]


def have_one_text(bundle: Path, growing: Sequence[str], others: Sequence[str], prompt: Callable[..., Any]) -> None:
    choose = random.Random(0)
    with Decoder.open(bundle, max_batch=1) as alone:
        for _ in range(CROWDS):
            asks = list(some_asks(choose, growing, others, lambda: prompt(choose)))
            expected = said(alone, asks)
            room: dict[str, Any] = {
                "max_batch": choose.choice((2, 3, 5, 8)),
                "prefix_bytes": choose.choice((None, 1 << 24)),
            }
            with Decoder.open(bundle, **room) as decoder:
                for _ in range(2):
                    assert said(decoder, asks, choose) == expected, asks


def of_text(choose: random.Random) -> tuple[list[int], list[bytes]]:
    beginning = [7 * place % VOCAB for place in range(choose.choice((0, 1, 2, 33, 70, 90)))]
    return beginning + choose.choices(range(VOCAB), k=choose.choice((1, 1, 2, 3, 30))), []


def test_of_a_draft_and_of_copies(llama: Pair) -> None:
    have_one_text(llama.bundle, ["model"], ["lookup", "suffix", "cascade", "model+suffix", "suffix+model"], of_text)


def test_of_heads(every_kind: dict[str, Headed]) -> None:
    lines = "blockwise", "lookup", "eagle3+lookup", "suffix+dspark", "medusa+suffix"
    growing = "eagle3", "mtp", "peagle", "dflash", "dspark", "medusa"
    have_one_text(every_kind["eagle3"].bundle, growing, lines, of_text)


def test_of_a_draft_with_other_tokens(merging: Pair) -> None:
    have_one_text(merging.bundle, [], ["common", "text", "lookup"], of_text)


def test_of_a_recurrent_draft(hybrids: Callable[[str], Hybrid]) -> None:
    bundle = hybrids("qwen3_5_text").bundle
    have_one_text(bundle, ["model"], ["lookup", "cascade", "model+suffix", "model+lookup"], of_text)


def test_of_drafts_and_heads_that_see(llava: Seeing, tmp_path: Path) -> None:
    """Images stand anywhere, also where a draft's next step would read again what it has read."""
    seeing("llava", tmp_path / "draft", seed=1)
    heads = [
        eagle3_head(tmp_path / "eagle3", llava.path, read=(0, 1), scale=0.3),
        eagle3_head(tmp_path / "peagle", llava.path, read=(0, 1), scale=0.3, mask=1),
        mtp_head(tmp_path / "mtp", llava.path, kind="llama", scale=0.3),
        parallel_heads(tmp_path / "medusa", llava.path, "medusa"),
    ]
    export_bundle(llava.path, tmp_path / "bundle", [tmp_path / "draft", *heads], images=True)
    files = [image(40, 30, number) for number in range(3)]

    def prompt(choose: random.Random) -> tuple[str, list[bytes]]:
        count = choose.choice((0, 1, 1, 2))
        words = ["x" * choose.choice((0, 1, 2, 3, 10, 40)) for _ in range(count + 1)]
        return llava.placeholder.join(words) or "x", choose.choices(files, k=count)

    have_one_text(tmp_path / "bundle", ["model", "eagle3", "mtp", "peagle"], ["lookup", "medusa", "cascade"], prompt)
