"""Prompts are those of transformers' apply_chat_template; what users say never becomes a special token."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trt_spec.engines import EngineError, RequestError, TokenizerEntry
from trt_spec.tools.making.kept_bundles import TARGET
from trt_spec.tools.serving import templates
from trt_spec.tools.serving.sandbox import MOST_SECONDS
from trt_spec.tools.serving.templates import MARKS, ChatTemplate

from ...kit.small_tokenizers import byte_level, in_pieces
from .styles import STYLES, Style

CONVERSATIONS = {
    "one question": [{"role": "user", "content": "  What is 1 < 2 & 'so'?\n"}],
    "a system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    "several turns": [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "Grüße, 你好 🙂"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\n def f(x):\n\treturn {x!r} "},
        {"role": "user", "content": "{{ bos_token }} {% raw %}"},
    ],
}
ENTRY = TokenizerEntry(300, 256, (257,))


KINDS = {"byte-level": byte_level, "in pieces": in_pieces}


def both(style: Style, kind: str = "byte-level") -> tuple[ChatTemplate, PreTrainedTokenizerFast, Tokenizer]:
    """The template in our hands and in those of transformers."""
    tokenizer = KINDS[kind](style.special)
    bos, eos = style.special[:2]
    reference = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos)
    reference.chat_template = style.template
    entry = replace(ENTRY, bos_token_id=tokenizer.token_to_id(bos), eos_token_ids=(tokenizer.token_to_id(eos),))
    return ChatTemplate(style.template, tokenizer, entry), reference, tokenizer


def theirs(reference: Any, messages: list, **settings: Any) -> list[int]:
    asked = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    return list(reference.apply_chat_template(messages, **asked, **settings))


def test_there_are_twenty_styles():
    assert len(STYLES) >= 20


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STYLES)
def test_prompts_equal_transformers_in_every_style(name: str, kind: str):
    ours, reference, _ = both(STYLES[name], kind)
    for messages in CONVERSATIONS.values():
        assert ours.encode(messages) == theirs(reference, messages)


def test_settings_reach_the_template():
    ours, reference, tokenizer = both(STYLES["qwen"])
    messages = CONVERSATIONS["one question"]
    found = ours.encode(messages, {"enable_thinking": False})
    assert found == theirs(reference, messages, enable_thinking=False) != ours.encode(messages)
    assert tokenizer.decode(found, skip_special_tokens=False).endswith("<think>\n\n</think>\n\n")


def test_a_section_of_tools_is_written_as_transformers_writes_it():
    ours, reference, _ = both(STYLES["qwen"])
    tools = [{"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {"type": "object"}}}]
    messages = CONVERSATIONS["a system"]
    assert ours.encode(messages, {"tools": tools}) == theirs(reference, messages, tools=tools)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STYLES)
def test_special_tokens_that_users_spell_out_stay_text(name: str, kind: str):
    style = STYLES[name]
    ours, _, tokenizer = both(style, kind)
    special = {tokenizer.token_to_id(token) for token in style.special}
    spelt = "a" + "".join(style.special) + "b"
    harmless = ours.encode([{"role": "user", "content": "ab"}])
    found = ours.encode([{"role": "user", "content": spelt}])
    assert [token for token in found if token in special] == [token for token in harmless if token in special]
    assert spelt.replace("▁", " ") in tokenizer.decode(found, skip_special_tokens=False).replace("▁", " ")


def test_a_special_token_stays_text_wherever_a_user_puts_it():
    ours, _, tokenizer = both(STYLES["qwen"])
    end = tokenizer.token_to_id("<|im_end|>")
    messages = [{"role": "user", "content": f"{MARKS[0]}<|im_end|>", "name": "<|im_end|>"}]
    assert ours.encode(messages, {"tools": [{"<|im_end|>": ["<|im_end|>"]}]}).count(end) == 2, "tools, then the user"


def test_messages_with_all_marks_beside_a_special_token_are_refused():
    ours, _, _ = both(STYLES["qwen"])
    ours.encode([{"role": "user", "content": MARKS}])
    with pytest.raises(RequestError, match=r"have U\+10FFFD and U\+10FFFC, which mean nothing"):
        ours.encode([{"role": "user", "content": f"{MARKS}<|im_end|>"}])


def test_special_tokens_that_users_spell_out_have_no_tokenizer_made_each_time(monkeypatch: pytest.MonkeyPatch):
    """To make one of a large vocabulary takes a second, in which nobody else is answered."""
    ours, _, _ = both(STYLES["qwen"])
    made = []

    class Counted:
        @staticmethod
        def from_str(text: str) -> Tokenizer:
            made.append(text)
            return Tokenizer.from_str(text)

    monkeypatch.setattr(templates, "Tokenizer", Counted)
    for content in ("<|im_end|>", "a<|im_start|>", f"{MARKS[0]}<|im_end|>", "<|im_end|>b", f"{MARKS[0]}<|im_end|>c"):
        ours.encode([{"role": "user", "content": content}])
    assert len(made) == 2, "one for each mark"


def test_a_tokenizer_that_reads_a_special_token_even_from_text_refuses_it():
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "<s>": 1, "hi": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>"])
    ours = ChatTemplate("{{ messages[0].content }}", tokenizer, ENTRY)
    with pytest.raises(RequestError, match="spell out a special token that this tokenizer cannot read as text"):
        ours.encode([{"role": "user", "content": "hi <s>"}])


@pytest.mark.parametrize("name", ["llama-2", "mistral"])
def test_what_a_template_refuses_is_the_requests_error(name: str):
    ours, _, _ = both(STYLES[name])
    messages = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(
        RequestError, match=r"the chat template refuses these messages: .*roles must alternate"
    ) as error:
        ours.encode(messages)
    assert error.value.field == "messages"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "takes more than 1 s"),
        ("{% for a in range(99999) %}{{ 'aaaaaaaaaa' * 999 }}{% endfor %}", "takes more than 1 s or writes too much"),
        ("{{ 'a' * 999999999999 }}", "takes more than 1 s or writes too much"),
        ("{{ 9 ** 9 ** 9 }}", "takes more than 1 s or writes too much"),
        (
            "{% set ns = namespace(x='aaaa') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "takes more than 1 s or writes too much",
        ),
        (
            "{% set ns = namespace(x='aaaa') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
            "takes more than 1 s or writes too much",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails on these messages (RecursionError"),
        ("{{ range(10 * 999999) }}", "fails on these messages (OverflowError"),
        ("{{ messages.__class__.__mro__ }}", "does what no template may"),
        ("{{ ''.format.__globals__.x }}", "does what no template may"),
        ("{{ messages.append(1) }}", "does what no template may"),
        ("{{ dict.__init__() }}", "does what no template may"),
        ("{{ namespace(__class__=1) }}", "does what no template may"),
        ("{% include '/etc/passwd' %}", "fails on these messages (TypeError: no loader"),
        ("{{ nothing.at.all }}", "fails on these messages (UndefinedError: 'nothing' is undefined"),
    ],
)
def test_a_template_that_explodes_or_does_what_it_may_not_ends_in_a_sentence(template: str, message: str):
    ours, _, _ = both(Style(template, ("<s>", "</s>")))
    with pytest.raises(EngineError, match=re.escape(message)):
        ours.render([{"role": "user", "content": "a"}])
    assert MOST_SECONDS == 1


def test_a_text_that_is_no_template_is_refused_at_once():
    with pytest.raises(RequestError, match=r"the chat template is not one \(.*\); correct it"):
        both(Style("{% for %}", ("<s>", "</s>")))


def test_the_demo_pair_reads_questions_as_comments_before_code():
    tokenizer = Tokenizer.from_file(str(Path(TARGET) / "tokenizer.json"))
    source = (Path(TARGET) / "chat_template.jinja").read_text()
    ours = ChatTemplate(source, tokenizer, TokenizerEntry(4096, 0, (0,)))
    said = [("user", "add\ntwo "), ("assistant", "def add(a, b): return a + b"), ("user", "halve")]
    messages = [{"role": role, "content": content} for role, content in said]
    assert ours.render(messages) == "# add\n# two\ndef add(a, b): return a + b\n\n# halve\n"
