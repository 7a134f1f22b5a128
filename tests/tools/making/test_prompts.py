"""Questions become the chats that their target's template writes, whoever learns from the answers."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from trt_spec.engines import RequestError
from trt_spec.tools.making.prompts import chosen_prompts, token_ids

from ...kit.models import tiny_llama

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
QUESTIONS = ("what is a river", "name three")


def chosen(target: Path, chat: bool) -> Sequence[str]:
    (target.parent / "asked.txt").write_text("\n".join(QUESTIONS))
    return chosen_prompts(target.parent / "asked.txt", chat, str(target))


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("written", ["", "{{ bos_token }}"])
def test_questions_become_chats_with_one_beginning(tmp_path: Path, begins: bool, written: str):
    """Whether the tokenizer writes the first token of a text by itself or not, and the template or not."""
    target = tiny_llama(tmp_path / "target")
    (target / "chat_template.jinja").write_text(written + TEMPLATE)
    spec = json.loads((target / "tokenizer.json").read_text())
    [first] = [token for token, number in spec["model"]["vocab"].items() if number == 0]
    (target / "tokenizer_config.json").write_text(json.dumps({"bos_token": first}))
    if begins:
        token = {"SpecialToken": {"id": first, "type_id": 0}}
        text = {"Sequence": {"id": "A", "type_id": 0}}
        special = {first: {"id": first, "ids": [0], "tokens": [first]}}
        spec["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [token, text],
            "pair": [token, text],
            "special_tokens": special,
        }
        (target / "tokenizer.json").write_text(json.dumps(spec))
    theirs = AutoTokenizer.from_pretrained(target)
    found = chosen(target, chat=True)
    ids = token_ids(Tokenizer.from_file(str(target / "tokenizer.json")), found)
    for one, question in zip(ids, QUESTIONS, strict=True):
        asked = [{"role": "user", "content": question}]
        assert one == theirs.apply_chat_template(asked, add_generation_prompt=True).input_ids
    assert chosen(target, chat=False) == list(QUESTIONS), "without --chat they are texts to continue"


def test_a_target_without_a_template_is_refused(tmp_path: Path):
    with pytest.raises(RequestError, match="has no chat template; leave out --chat"):
        chosen(tiny_llama(tmp_path / "target"), chat=True)
