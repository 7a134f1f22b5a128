"""A draft reads what its target has said in its own tokens, and what it says becomes the target's."""

import pytest
import torch
from trt_spec.runtime.translation.own_text import OwnText
from trt_spec.runtime.translation.translation import Translation

from ...kit.small_tokenizers import byte_level, in_pieces

OURS, OWN = byte_level(("<end>", "<begin>", "<|user|>")), in_pieces(("<unk>", "<s>", "</s>"))
END, BEGIN, USER = (OURS.token_to_id(name) for name in ("<end>", "<begin>", "<|user|>"))


def translation(opening: tuple[int, ...] = ()) -> Translation:
    nothing = torch.zeros(0, dtype=torch.int64)
    special = frozenset(range(3))
    return Translation(OURS, OWN, nothing, nothing, OWN.get_vocab_size(), opening, {END: 2, BEGIN: 1}, special)


def ours(text: str) -> list[int]:
    return OURS.encode(text, add_special_tokens=False).ids


def own(text: str) -> list[int]:
    return OWN.encode(text, add_special_tokens=False).ids


def test_special_tokens_are_told_by_what_they_are_for_and_all_else_by_its_text():
    text = OwnText(translation())
    text.follow([BEGIN, *ours("ask"), USER, *ours("a dog")], [END, *ours("and")])
    assert text.ids == [1, *own("ask<|user|>a dog"), 2, *own("and")]
    assert OWN.token_to_id("<unk>") not in text.ids


def test_a_text_begins_as_the_drafts_texts_do():
    text = OwnText(translation(opening=(1,)))
    text.follow(ours("a dog"), [])
    assert text.ids == [1, *own("a dog")]
    begun = OwnText(translation(opening=(1,)))
    begun.follow([BEGIN, *ours("a dog")], [])
    assert begun.ids == text.ids


def test_a_character_that_is_not_whole_yet_is_not_read():
    text, tokens = OwnText(translation()), ours("a é")
    assert len(tokens) == 4, "two bytes"
    text.follow(tokens[:3], [])
    assert not text.whole
    assert text.ids == own("a ")
    text.follow(tokens[:3], tokens[3:])
    assert text.whole
    assert OWN.decode(text.ids) == OWN.decode(own("a é"))


def test_bytes_that_never_become_a_character_are_passed_by():
    text = OwnText(translation())
    broken = ours("é")[:1]
    text.follow([*ours("a"), *20 * broken], [])
    text.follow([*ours("a"), *20 * broken], ours(" dog"))
    assert text.whole
    assert OWN.decode(text.ids).endswith(" dog")


def test_each_step_reads_what_is_new_alone():
    text, whole = OwnText(translation()), OwnText(translation())
    prompt, output = ours("what is a dog"), ours(" that barks at night?")
    for end in range(0, len(output) + 1, 3):
        text.follow(prompt, output[:end])
    text.follow(prompt, output)
    whole.follow(prompt, output)
    assert text.ids == whole.ids == own("what is a dog that barks at night?")
    assert text.read == len(prompt) + len(output)


@pytest.mark.parametrize(("drafted", "expected"), [(" barks", " barks"), (" ba", " ba")])
def test_what_the_draft_says_becomes_the_targets_tokens(drafted: str, expected: str):
    text = OwnText(translation())
    text.follow(ours("a dog"), [])
    said = own(f"a dog{drafted}")[len(own("a dog")) :]
    assert OURS.decode(text.said(said)) == expected


def test_where_the_draft_ends_the_target_is_proposed_its_own_end():
    text = OwnText(translation())
    text.follow(ours("a dog"), [])
    said = own("a dog barks")[len(own("a dog")) :]
    assert text.said([*said, 2, *said]) == [*ours(" barks"), END]
    assert text.said([0, *said]) == [], "an unknown token says nothing"
