"""What a model reasons is told from what it answers, however its text is cut, in every API."""

import json

import pytest
from trt_spec.engines import RequestError
from trt_spec.tools.serving import marks
from trt_spec.tools.serving.marks import marks_of
from trt_spec.tools.serving.reasoning import ReasoningReader, has_begun
from trt_spec.tools.serving.tool_calls import MarkedReader, TextReader, joined

from ...kit.bundles import Pair
from ...kit.schemas import FORMAT
from .conftest import Served, serving

MARKS = ("<think>", "</think>")


@pytest.mark.parametrize(
    ("text", "begun", "thought", "answer"),
    [
        ("<think>\nwell\n</think>\n\nYes.", False, "well\n", "Yes."),
        ("  <think>well</think>Yes.", False, "well", "Yes."),
        ("well</think> Yes.", True, "well", "Yes."),
        ("Yes. <think>no</think>", False, "", "Yes. <think>no</think>"),
        ("<think>well, </thin", False, "well, </thin", ""),
        ("<thi", False, "", "<thi"),
        (" plain", False, "", " plain"),
        ("<think></think>Yes.", False, "", "Yes."),
        ("a < b </ c </think>d </think> e", True, "a < b </ c ", "d </think> e"),
        ("", True, "", ""),
    ],
)
def test_reasoning_is_told_from_the_answer_however_it_is_cut(text: str, begun: bool, thought: str, answer: str):
    for size in range(1, len(text) + 2):
        reader = ReasoningReader(TextReader(), MARKS, begun)
        deltas = [one for start in range(0, len(text), size) for one in reader.feed(text[start : start + size])]
        delta = joined([*deltas, *reader.end(whole=True)])
        assert (delta.reasoning_content or "", delta.content or "") == (thought, answer), size


def test_calls_follow_reasoning():
    text = '<think>a <tool_call>?</think>\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for size in range(1, len(text)):
        calls = MarkedReader(["f"], ("<tool_call>", "</tool_call>"))
        reader = ReasoningReader(calls, MARKS, begun=False)
        deltas = [one for start in range(0, len(text), size) for one in reader.feed(text[start : start + size])]
        delta = joined([*deltas, *reader.end(whole=True)])
        assert (delta.reasoning_content, reader.calls) == ("a <tool_call>?", 1)
        assert "".join(call.function.arguments for call in delta.tool_calls) == "{}"


def test_a_prompt_says_whether_reasoning_has_begun():
    assert has_begun("<|assistant|><think>\n", MARKS)
    assert not has_begun("<|assistant|><think>\n\n</think>\n\n", MARKS)
    assert not has_begun("<think> is a mark<|assistant|>", MARKS)


def test_marks_that_no_text_shows_are_refused():
    assert marks_of("mistral", ["<s>"]) == ("[THINK]", "[/THINK]")
    with pytest.raises(RequestError, match="special token of this tokenizer"):
        marks_of("mistral", ["[THINK]"])
    with pytest.raises(RequestError, match="expected one of deepseek_r1, qwen3"):
        marks_of("other", [])


TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ reasoning_effort }}{% if not quick %}<{% endif %}"
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "abc"}], "seed": 3, "rule": "coupled"}
ASK |= {"max_completion_tokens": 60}


@pytest.fixture(scope="module")
def thinking(signs: Pair):
    """A model whose reasoning ends with a sign that its vocabulary can be biased to write."""
    patch = pytest.MonkeyPatch()
    patch.setitem(marks.PARSERS, "qwen3", ("<", ">"))
    with serving(signs, template=TEMPLATE, reasoning="qwen3") as server:
        yield server
    patch.undo()


def raw(server: Served, **asked: object) -> str:
    """The whole text, by its tokens."""
    answer = server.post("/v1/chat/completions", ASK | asked | {"return_token_ids": True}).json()
    return server.decoder.tokenizer.decode(answer["choices"][0]["token_ids"])


def ends_with(server: Served) -> dict:
    [end] = server.decoder.tokenizer.encode(">", add_special_tokens=False).ids
    return {"logit_bias": {str(end): 2}}


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_has_a_field_of_its_own(thinking: Served, stream: bool):
    asked = ends_with(thinking)
    text = raw(thinking, **asked)
    thought, mark, answer = text.partition(">")
    assert mark
    assert thought.strip()
    assert answer.strip()
    choices = thinking.openai.chat.completions.create(
        **{name: value for name, value in ASK.items() if name != "rule"} | asked,
        extra_body={"rule": "coupled"},
        stream=stream,
    )
    parts = [chunk.choices[0].delta for chunk in choices] if stream else [choices.choices[0].message]
    assert "".join(getattr(part, "reasoning_content", None) or "" for part in parts) == thought.lstrip()
    assert "".join(part.content or "" for part in parts) == answer.lstrip()


@pytest.mark.parametrize("begun", [True, False])
def test_a_format_bounds_the_answer_and_not_the_reasoning(thinking: Served, begun: bool):
    asked = {"max_completion_tokens": 200, "response_format": FORMAT, "chat_template_kwargs": {"quick": not begun}}
    message = thinking.post("/v1/chat/completions", ASK | ends_with(thinking) | asked).json()["choices"][0]["message"]
    assert json.loads(message["content"])["n"] in ("a", "b"), message
    if begun:
        assert message["reasoning_content"]


def test_reasoning_is_an_item_of_a_response_and_a_block_of_a_message(thinking: Served):
    thought, _, answer = raw(thinking, **ends_with(thinking)).partition(">")
    body = {"input": "abc", "max_output_tokens": 60, "seed": 3, "rule": "coupled"} | ends_with(thinking)
    first, second = thinking.post("/v1/responses", body).json()["output"]
    assert (first["type"], first["content"][0]["text"]) == ("reasoning", thought.lstrip())
    assert second["content"][0]["text"] == answer.lstrip()
    body = {"messages": ASK["messages"], "max_tokens": 60, "seed": 3, "rule": "coupled"} | ends_with(thinking)
    first, second = thinking.post("/v1/messages", body).json()["content"]
    assert (first["type"], first["thinking"], second["text"]) == ("thinking", thought.lstrip(), answer.lstrip())


def test_the_template_gets_the_effort(thinking: Served):
    low, plain = (
        thinking.post("/v1/chat/completions", ASK | asked | {"max_completion_tokens": 1}).json()["usage"]
        for asked in ({"reasoning_effort": "low"}, {})
    )
    assert low["prompt_tokens"] == plain["prompt_tokens"] + len(thinking.decoder.tokenizer.encode("low").ids)
