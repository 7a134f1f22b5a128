"""A text that grows has the tokens of the whole text, though only its end is read again."""

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from trt_spec.runtime.translation import growing
from trt_spec.runtime.translation.growing import GrowingTokens

from ...kit.small_tokenizers import byte_level, in_pieces

ROOT = Path(__file__).resolve().parents[3]
SHIPPED = Tokenizer.from_file(str(ROOT / "tools" / "demo_pair" / "pycode-14m" / "tokenizer.json"))
TEXT = (ROOT / "export" / "sample.txt").read_text() + "  déjà vu, 字 und 漢字\n\n\n" + 40 * "字漢"


def pieces(seed: int) -> list[str]:
    choose, begin, found = random.Random(seed), 0, list[str]()
    while begin < len(TEXT):
        found.append(TEXT[begin : (begin := begin + choose.randint(0, 12))])
    return found


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


KINDS = pytest.mark.parametrize(
    "tokenizer", [SHIPPED, byte_level(("<s>",)), in_pieces(("<unk>", "<s>"))], ids=["shipped", "bytes", "pieces"]
)


@KINDS
def test_its_tokens_are_those_of_the_whole_text(tokenizer: Tokenizer):
    grown, text = GrowingTokens(tokenizer), ""
    for number, piece in enumerate(pieces(seed=1)):
        text += piece
        grown.append(piece)
        if number % 5 == 0:
            assert grown.ids == whole(tokenizer, text)
    assert grown.ids == whole(tokenizer, text)


@KINDS
def test_only_the_end_is_read_again(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    read, encode = list[int](), growing._encode

    def watched(tokenizer: Tokenizer, text: str) -> list[int]:
        read.append(len(text))
        return encode(tokenizer, text)

    monkeypatch.setattr(growing, "_encode", watched)
    grown = GrowingTokens(tokenizer)
    for piece in pieces(seed=2):
        grown.append(piece)
        assert isinstance(grown.ids, list)
    assert max(read) < 2 * growing.LONGEST
    assert len(TEXT) > 10 * growing.LONGEST


def test_what_may_follow_is_tokenised_behind_the_text_and_leaves_it_as_it_is():
    grown = GrowingTokens(SHIPPED)
    grown.append("def read(self, path):\n        return self.")
    before = grown.ids
    behind = grown.following("open(path).read()")
    assert before + behind == whole(SHIPPED, "def read(self, path):\n        return self.open(path).read()")
    assert grown.ids == before


def test_what_would_merge_with_the_last_token_is_tokenised_alone():
    """The target has said that token, and says what comes after it."""
    grown = GrowingTokens(SHIPPED)
    grown.append("re")
    assert whole(SHIPPED, "return") != whole(SHIPPED, "re") + whole(SHIPPED, "turn")
    assert SHIPPED.decode(grown.following("turn x")) == "turn x"


def test_a_token_that_is_no_text_parts_what_is_before_it_from_what_is_behind():
    grown = GrowingTokens(SHIPPED)
    grown.append("re")
    grown.put(0)
    grown.append("turn")
    assert grown.ids == [*whole(SHIPPED, "re"), 0, *whole(SHIPPED, "turn")]
