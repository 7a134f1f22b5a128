"""Prompts with images are those of transformers' processors, by chat templates as published models have them."""

import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from trt_spec.engines.bundle import TokenizerEntry
from trt_spec.export.writing.images import image_settings, write_image_settings
from trt_spec.runtime.images.reader import ImageReader
from trt_spec.tools.serving.templates import ChatTemplate

from ...kit.image_processors import CROPS, tokenizer, whole_processor, write_processor
from ...kit.images import image_file

TEMPLATES = {
    "llava": (  # it knows parts alone
        "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
        "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
        "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}"
        "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    ),
    "gemma3": (
        "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' + message['role'] + '\n' }}"
        "{%- if message['content'] is string -%}{{ message['content'] | trim }}{%- else -%}"
        "{%- for item in message['content'] -%}{%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}"
        "{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}{%- endif -%}"
        "{{ '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
    ),
    "idefics3": (
        "{% for message in messages %}{{ message['role'] | capitalize }}"
        "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
        "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
        "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
        "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
    ),
}
TEMPLATES["gemma3-crops"] = TEMPLATES["gemma3"]
FILES = [image_file(57, 33), image_file(31, 90), image_file(9, 9, "L")]


@pytest.fixture(params=TEMPLATES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def with_plain_placeholder(spoken: Tokenizer, placeholder: str) -> Tokenizer:
    """Return a tokenizer that takes a placeholder for a word like others, as some published ones do."""
    spec = json.loads(spoken.to_str())
    for one in spec["added_tokens"]:
        one["special"] &= one["content"] != placeholder
    return Tokenizer.from_str(json.dumps(spec))


def reader_of(name: str, folder: Path) -> ImageReader:
    kept = image_settings(SimpleNamespace(name="checkpoint", path=write_processor(name, folder)), tokenizer())
    write_image_settings(kept, folder)
    return ImageReader.open(folder)


def template_of(name: str, reader: ImageReader, spoken: Tokenizer | None = None) -> ChatTemplate:
    spoken = spoken or tokenizer()
    entry = TokenizerEntry(spoken.get_vocab_size(), spoken.token_to_id("<s>"), (spoken.token_to_id("</s>"),))
    return ChatTemplate(TEMPLATES[name], spoken, entry, reader)


def said(role: str, *content: str | bytes) -> dict[str, Any]:
    parts = [{"type": "image"} if isinstance(one, bytes) else {"type": "text", "text": one} for one in content]
    return {"role": role, "content": parts}


TALK = [
    said("user", FILES[0], "\nwhat is", FILES[1], " and this?\n"),
    said("assistant", "two\n\n"),
    said("user", FILES[2]),
]


def test_prompts_are_those_of_transformers(name: str, tmp_path: Path):
    reader = reader_of(name, tmp_path)
    pictures = [reader.read(content) for content in FILES]
    ours = template_of(name, reader).encode(TALK, pictures=pictures)
    whole, left = whole_processor(name, tmp_path), iter(FILES)
    theirs = [
        message
        | {
            "content": [
                part | {"base64": base64.b64encode(next(left)).decode()} if part["type"] == "image" else part
                for part in message["content"]
            ]
        }
        for message in TALK
    ]
    asked: dict[str, Any] = {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    if name == "gemma3-crops":
        asked["processor_kwargs"] = {"images_kwargs": CROPS}
    whole.tokenizer.bos_token = "<s>"
    expected = whole.apply_chat_template(theirs, TEMPLATES[name], **asked)["input_ids"]
    assert reader.expand(ours, pictures) == expected[0]


def test_texts_alone_are_written_as_parts_where_a_template_knows_nothing_else(name: str, tmp_path: Path):
    template = template_of(name, reader_of(name, tmp_path))
    plain = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "this"}]
    parts = [said("user", "what?"), said("assistant", "this")]
    assert template.encode(plain) == template.encode(parts)
    assert "what?" in template.render(plain)


@pytest.mark.parametrize("special", [True, False], ids=["special", "a word"])
def test_special_tokens_that_users_spell_stay_text_beside_images(name: str, special: bool, tmp_path: Path):
    reader, spoken = reader_of(name, tmp_path), tokenizer()
    if not special:
        spoken = with_plain_placeholder(spoken, reader.placeholder)
    template = template_of(name, reader, spoken)
    for text in ("</s>", reader.placeholder):
        found = template.encode([said("user", FILES[0], f"\n{text}", FILES[1], f"{text} x")])
        stand_in = spoken.token_to_id("@")
        spelled = [spoken.token_to_id(character) for character in text]
        plain = template.encode([said("user", FILES[0], "\n@", FILES[1], "@ x")])
        assert found == [token for one in plain for token in (spelled if one == stand_in else [one])]


def test_the_text_that_is_shown_is_the_one_that_is_read(name: str, tmp_path: Path):
    """With all that a processor writes around its images, and what a user spells out as it was."""
    reader, spoken = reader_of(name, tmp_path), tokenizer()
    pictures, template = [reader.read(content) for content in FILES], template_of(name, reader, spoken)
    text = template.write(TALK, pictures=pictures)
    assert text == reader.surrounded(template.render(TALK), pictures)
    assert spoken.encode(text).ids == template.encode(TALK, pictures=pictures)
    spelt = [said("user", FILES[0], f"\n{reader.placeholder}"), *TALK[1:]]
    plain = [said("user", FILES[0], "\n@"), *TALK[1:]]
    assert template.write(spelt, pictures=pictures[:2]) == template.write(plain, pictures=pictures[:2]).replace(
        "@", reader.placeholder
    )
