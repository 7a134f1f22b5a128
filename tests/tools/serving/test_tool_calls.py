"""Tools, as clients of OpenAI's API call them: forced, or in text that marks its calls."""

import json

import openai
import pytest
from trt_spec.tools.serving import templates
from trt_spec.tools.serving.answers import ChatMessage
from trt_spec.tools.serving.tool_calls import CallReader, MarkedReader, joined, message_of

from ...kit.bundles import Pair
from ...kit.schemas import FORMAT, TOOLS
from .conftest import Served, serving

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "abc"}], "seed": 3, "max_completion_tokens": 200}
ASK |= {"extra_body": {"rule": "coupled"}}  # whose text is that of the target, whatever else changes


def called(answer, stream: bool) -> tuple[str, str, str]:
    """Name, arguments and finish reason of the one call."""
    if not stream:
        [choice] = answer.choices
        assert choice.message.content is None
        [call] = choice.message.tool_calls
        return call.function.name, call.function.arguments, choice.finish_reason
    choices = [chunk.choices[0] for chunk in answer]
    assert not any(choice.delta.content for choice in choices)
    deltas = [call for choice in choices for call in choice.delta.tool_calls or ()]
    assert {delta.index for delta in deltas} == {0}
    assert deltas[0].id.startswith("call_")
    assert all(delta.id is None for delta in deltas[1:])
    return deltas[0].function.name, "".join(one.function.arguments for one in deltas), choices[-1].finish_reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "take_away"}}])
def test_a_tool_is_called_as_its_schema_says(server: Served, choice: object, stream: bool):
    answer = server.openai.chat.completions.create(**ASK, tools=TOOLS, tool_choice=choice, stream=stream)
    name, arguments, reason = called(answer, stream)
    assert name in (("add", "take_away") if choice == "required" else ("take_away",))
    assert json.loads(arguments)["n"] in ("a", "b")
    assert reason == "tool_calls"


def test_with_no_choice_the_answer_is_text(server: Served):
    answer = server.openai.chat.completions.create(**ASK, tools=TOOLS, tool_choice="none").choices[0]
    assert (answer.message.content is None, answer.message.tool_calls) == (False, None)


def test_where_the_template_tells_of_no_calls_auto_answers_in_text(server: Served):
    said = [
        server.openai.chat.completions.create(**ASK, tools=TOOLS, **asked).choices[0].message
        for asked in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"})
    ]
    assert {(one.content, one.tool_calls) for one in said} == {(said[0].content, None)}


SOME = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}
SOME["allowed_tools"]["tools"] = [{"type": "function", "function": {"name": "take_away"}}]


def test_only_allowed_tools_are_called(server: Served):
    for seed in range(4):
        answer = server.openai.chat.completions.create(**ASK | {"seed": seed}, tools=TOOLS, tool_choice=SOME)
        assert called(answer, False)[0] == "take_away"


@pytest.mark.parametrize(
    ("asked", "param", "said"),
    [
        (
            {"tools": TOOLS[:1], "tool_choice": SOME},
            "tool_choice",
            "tool_choice allows 'take_away', expected some of the tools",
        ),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "names 'x'"),
        (
            {"tools": TOOLS, "tool_choice": "required", "extra_body": {"structured_outputs": {"choice": ["a"]}}},
            "structured_outputs",
            "structured_outputs and tool_choice both say what the answer is",
        ),
    ],
)
def test_a_choice_that_cannot_be_kept_is_refused_by_name(server: Served, asked: dict, param: str, said: str):
    with pytest.raises(openai.BadRequestError, match=said) as error:
        server.openai.chat.completions.create(**ASK | asked)
    assert error.value.param == param


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "take_away"}}])
def test_where_a_call_is_required_no_text_has_the_format(server: Served, choice: object):
    asked = ASK | {"tools": TOOLS, "tool_choice": choice}
    answers = [
        called(server.openai.chat.completions.create(**asked, **more), False)
        for more in ({}, {"response_format": FORMAT}, {"response_format": {"type": "json_object"}})
    ]
    assert answers == answers[:1] * 3


@pytest.mark.parametrize("parallel", [True, False])
def test_where_a_tool_may_be_called_the_answer_is_a_call_or_has_the_format(marking: Served, parallel: bool):
    [begins] = marking.decoder.tokenizer.encode("<", add_special_tokens=False).ids
    asked = ASK | {"tools": TOOLS, "response_format": FORMAT, "parallel_tool_calls": parallel}
    likely, never = ({"logit_bias": {str(begins): bias}} for bias in (100, -100))
    [choice] = marking.openai.chat.completions.create(**asked, **never).choices
    assert choice.message.tool_calls is None
    assert json.loads(choice.message.content)["n"] in ("a", "b")
    [choice] = marking.openai.chat.completions.create(**asked, **likely).choices
    assert json.loads(choice.message.tool_calls[0].function.arguments)["n"] in ("a", "b")
    assert choice.message.content is None


def test_calls_and_their_results_reach_the_template(signs: Pair):
    """Arguments as an object, since templates write them out themselves."""
    template = (
        "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
        "{% for m in messages %}{{ m.role }}={{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments.n }}){% endfor %}"
        "{{ m.tool_call_id }}|{% endfor %}"
    )
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"n": "a"}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "call_1"},
    ]
    with serving(signs, template=template) as server:
        found = server.post("/tokenize", {"messages": messages, "return_token_strs": True}).json()
        assert "".join(found["token_strs"]) == "user=x|assistant=add(a)|tool=3call_1|"
        answer = server.openai.chat.completions.create(
            model="tiny", messages=messages, tools=TOOLS, tool_choice="required", max_completion_tokens=40
        )
        written = "add;take_away;user=x|assistant=add(a)|tool=3call_1|"
        assert answer.usage.prompt_tokens == len(server.decoder.tokenizer.encode(written).ids)


def test_a_call_comes_piece_by_piece_and_is_whole_without_its_brace():
    reader, text = CallReader(["add", "address"]), '{"name": "address", "arguments": {"n": {}}}'
    deltas = [call for letter in text for delta in reader.feed(letter) for call in delta.tool_calls or ()]
    assert not reader.end(whole=True)
    assert deltas[0].function.name == "address"
    assert "".join(delta.function.arguments for delta in deltas) == '{"n": {}}'
    [cut] = message_of(CallReader(["add"]), '{"name": "add", "arguments": {"n', whole=False).tool_calls
    assert cut.function.arguments == '{"n'
    assert message_of(CallReader(["add"]), '{"name": "a', whole=False) == ChatMessage('{"name": "a')


MARKS = templates.CALL_MARKS
ADD = '{"name": "add", "arguments": {"n": "</tool_call>"}}'
TAKE = '{"name": "take_away", "arguments": {"n": "b"}}'
ADDED, TAKEN = ("add", '{"n": "</tool_call>"}'), ("take_away", '{"n": "b"}')


@pytest.mark.parametrize(
    ("text", "whole", "content", "calls"),
    [
        ("no call, a < and a <tool", True, "no call, a < and a <tool", []),
        ("white space \n", True, "white space \n", []),
        (f"<tool_call>\n{ADD}\n</tool_call>", True, None, [ADDED]),
        (
            f"I add.\n<tool_call>\n{ADD}\n</tool_call>\n<tool_call>\n{TAKE}\n</tool_call>\n",
            True,
            "I add.",
            [ADDED, TAKEN],
        ),
        (f"<tool_call>\n{TAKE}\n</tool_call>\nDone. ", True, "\nDone. ", [TAKEN]),
        (f"<tool_call>\n{TAKE}\n</tool", False, None, [TAKEN]),
        ("<tool_call>\n" + TAKE[:-4], False, None, [("take_away", '{"n": "')]),
    ],
)
def test_calls_are_told_from_text_however_it_is_cut(text: str, whole: bool, content: str | None, calls: list):
    expected = message_of(MarkedReader(["add", "take_away"], MARKS), text, whole)
    assert expected.content == content
    assert [(one.function.name, one.function.arguments) for one in expected.tool_calls or ()] == calls
    for size in range(1, len(text)):
        reader = MarkedReader(["add", "take_away"], MARKS)
        pieces = [one for start in range(0, len(text), size) for one in reader.feed(text[start : start + size])]
        delta = joined([*pieces, *reader.end(whole)])
        assert (delta.content or None) == content
        assert reader.calls == len(calls)
        found = [(one.index, one.function.name, one.function.arguments) for one in delta.tool_calls or ()]
        assert found == [(index, *call) for index, call in enumerate(calls)]  # each call once, however it came


TELLS = """{% for m in messages %}{{ m.content }}{% endfor %}{# <tool_call>
{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>} #}"""


@pytest.fixture
def marking(signs: Pair, monkeypatch: pytest.MonkeyPatch):
    """A model whose calls stand between marks that its vocabulary can be biased to write."""
    monkeypatch.setattr(templates, "CALL_MARKS", ("<", "</"))
    with serving(signs, template=TELLS) as server:
        yield server


def test_no_chunk_of_a_call_says_nothing(server: Served):
    chunks = list(server.openai.chat.completions.create(**ASK, tools=TOOLS, tool_choice="required", stream=True))
    first, *others, last = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert (first.delta.role, last.finish_reason) == ("assistant", "tool_calls")
    assert others
    assert all(one.delta.model_dump(exclude_unset=True) for one in others)


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_may_call_a_tool_between_its_templates_marks(marking: Served, stream: bool):
    [begins] = marking.decoder.tokenizer.encode("<", add_special_tokens=False).ids
    asked = ASK | {"tools": TOOLS, "parallel_tool_calls": False, "stream": stream, "logit_bias": {str(begins): 100}}
    name, arguments, reason = called(marking.openai.chat.completions.create(**asked), stream)
    assert name in ("add", "take_away")
    assert json.loads(arguments)["n"] in ("a", "b")
    assert reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_required_is_marked_too(marking: Served, stream: bool):
    asked = ASK | {"tools": TOOLS, "tool_choice": "required", "stream": stream}
    assert called(marking.openai.chat.completions.create(**asked), stream)[2] == "tool_calls"
    body = {key: value for key, value in asked.items() if key != "extra_body"}
    body |= {"rule": "coupled", "stream": False, "return_token_ids": True}
    [choice] = marking.post("/v1/chat/completions", body).json()["choices"]
    assert marking.decoder.tokenizer.decode(choice["token_ids"]).startswith('<\n{"name": "')


def test_a_model_that_may_call_a_tool_may_answer_in_text(marking: Served):
    [choice] = marking.openai.chat.completions.create(**ASK, tools=TOOLS, logit_bias={"28": -100}).choices
    assert choice.message.tool_calls is None
    assert choice.message.content


def test_marks_that_the_text_does_not_show_are_not_relied_on(signs: Pair):
    with serving(signs, template=TELLS.replace("tool_call", "call")) as server:
        assert server.service.template.call_marks is None
