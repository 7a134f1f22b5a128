"""A text has at least as many tokens as its characters say, in every kind of tokenizer, and often not many more."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from trt_spec.tools.serving import tokenising
from trt_spec.tools.serving.shares import PIECE, least_tokens
from trt_spec.tools.serving.tokenising import TooManyTokens, encoded

from ...kit.small_tokenizers import byte_level, in_pieces

SHIPPED = Tokenizer.from_file(str(Path(__file__).parents[3] / "tools" / "demo_pair" / "pycode-14m" / "tokenizer.json"))
COMPOSING = byte_level(("<s>",))
COMPOSING.normalizer = normalizers.NFKC()
STRIPPING = byte_level(("<s>",))
STRIPPING.add_special_tokens([AddedToken("<w>", rstrip=True)])
TOKENIZERS = {
    "shipped": SHIPPED,
    "bytes": byte_level(("<s>", "</s>")),
    "pieces": in_pieces(("<s>", "</s>")),
    "composing": COMPOSING,
    "stripping": STRIPPING,
}
TEXT = st.one_of(
    st.text(),
    st.text("a e\u0301\u212b▁<s>\n", max_size=60),
    st.lists(st.sampled_from([" " * 40, "#" * 30, "<|endoftext|>", "self", "🚨🚨", "\t\t", "<w>"]), max_size=30).map(
        "".join
    ),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(TEXT)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_text_has_fewer_tokens(name: str, text: str):
    assert least_tokens(TOKENIZERS[name], text) <= len(encoded(TOKENIZERS[name], text, False))


def test_a_text_of_many_tokens_is_refused_before_it_is_tokenised(monkeypatch: pytest.MonkeyPatch):
    code = "def read(self, path):\n    return [line.strip() for line in open(path)]\n" * 2000
    count = len(SHIPPED.encode(code).ids)
    assert count / 5 < least_tokens(SHIPPED, code) < count
    monkeypatch.setattr(tokenising, "_give_memory_back", lambda: pytest.fail("it was tokenised"))
    with pytest.raises(TooManyTokens, match=r"prompt has at least [\d,]+ tokens, expected at most 2,048; shorten it"):
        encoded(SHIPPED, code, False, 2048)


@pytest.mark.parametrize("change", ["white space is left out", "an unknown word is one token", "letters are left out"])
def test_where_a_token_may_stand_for_any_text_nothing_is_said(change: str):
    tokenizer = byte_level(("<s>",))
    if change == "white space is left out":
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    elif change == "letters are left out":
        tokenizer.normalizer = normalizers.Replace("a", "")
    else:
        tokenizer.model.unk_token = "<s>"
    assert least_tokens(tokenizer, "a" * 1000) == 0
    assert least_tokens(byte_level(("<s>",)), "a" * 1000) == 1000


def test_a_long_text_is_looked_at_in_pieces_between_which_other_threads_have_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes, take = [], np.take

    def noting(shares: np.ndarray, signs: np.ndarray) -> np.ndarray:
        sizes.append(len(signs))
        return take(shares, signs)

    monkeypatch.setattr("trt_spec.tools.serving.shares.np.take", noting)
    text = "a\u00e9\u4e2d\U0001f600" * (2 * PIECE)
    assert least_tokens(byte_level(("<s>",)), text) == len(text.encode()), "whose tokens are bytes"
    assert len(sizes) == len(text) / PIECE
    assert max(sizes) <= 4 * PIECE
