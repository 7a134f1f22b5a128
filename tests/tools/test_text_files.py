"""Prompts are read as they were written, and a file that holds none is refused in a sentence."""

import json

import pytest
from trt_spec.engines import RequestError
from trt_spec.tools.text_files import read_prompts

STRANGE = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"  # what Python's splitlines takes for ends of lines


def test_a_line_ends_where_json_lines_say_it_does_and_nowhere_else(tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in ("a\u2028b", "c\u2029\x85d")]
    file.write_bytes("\r\n".join([lines[0], "", lines[1], ""]).encode())
    assert read_prompts(file) == ["a\u2028b", "c\u2029\x85d"]


def test_plain_prompts_keep_every_character_but_the_end_of_the_line(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes(f"{STRANGE}\nsecond \r\n\n  third".encode())
    assert read_prompts(file) == [STRANGE, "second ", "  third"]


@pytest.mark.parametrize(
    "line",
    ["[" * 100_000, '{"prompt": ' * 100_000, '{"prompt": "\\ud800"}', "[]", "null", '"prompt"', '{"prompt": 1}'],
    ids=["brackets", "objects", "surrogate", "list", "null", "text", "number"],
)
def test_a_line_that_holds_no_prompt_is_refused(tmp_path, line):
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "first"}}\n{line}\n')
    with pytest.raises(RequestError) as refused:
        read_prompts(file)
    assert str(refused.value) == (f'prompt 2 of {file} is {line[:40]!r}, expected an object like {{"prompt": "text"}}')
