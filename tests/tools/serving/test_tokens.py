"""Each token's bytes add up to the text, in every kind of tokenizer; what is no character is spelt in bytes."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from trt_spec.runtime import TokenLogprob
from trt_spec.tools.serving.tokens import Offsets, Spelling, completion_logprobs

from ...kit.small_tokenizers import byte_level, in_pieces

TEXT = "a <b/> grüße 你好 🙂\n"


def spelling_of(tokenizer: Tokenizer, folder: Path) -> Spelling:
    tokenizer.save(str(folder / "tokenizer.json"))
    return Spelling(tokenizer, folder / "tokenizer.json")


def test_the_bytes_of_tokens_add_up_to_the_text(tmp_path: Path):
    for tokenizer, begins in ((byte_level(("<s>", "</s>")), ""), (in_pieces(("<s>", "</s>")), " ")):
        spelling = spelling_of(tokenizer, tmp_path)
        ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
        assert b"".join(map(spelling.to_bytes, ids)).decode() == begins + TEXT
        assert spelling.to_text(tokenizer.token_to_id("<s>")) == "<s>"
        assert spelling.to_bytes(10**6) == b""


def test_tokens_of_whole_words_are_read_by_the_tokenizers_own_decoder(tmp_path: Path):
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "hi": 1, "##ho": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    assert spelling_of(tokenizer, tmp_path).to_text(1) == "hi"


def test_a_part_of_a_character_is_spelt_in_bytes_and_begins_where_the_character_does(tmp_path: Path):
    tokenizer = byte_level(("<s>", "</s>"))
    spelling = spelling_of(tokenizer, tmp_path)
    ids = [*tokenizer.encode("aü", add_special_tokens=False).ids, tokenizer.token_to_id("<s>")]
    found = completion_logprobs([TokenLogprob(token, -1.0, ()) for token in ids], ids, spelling, Offsets(10))
    assert found.tokens == ["a", "bytes:\\xc3", "bytes:\\xbc", "<s>"]
    assert found.text_offset == [10, 11, 11, 12]
    nothing = completion_logprobs([None], ids[:1], spelling, Offsets())
    assert (nothing.token_logprobs, nothing.top_logprobs) == ([None], [None])
