"""Images in what tools gave: each API puts them in their places among all images of the conversation."""

import base64
from collections.abc import Iterator
from typing import Any

import pytest
from trt_spec.runtime import Decoder, SamplingParams

from ...kit.images import image_file
from ...kit.seeing_models import Seeing
from .conftest import Served, serving

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endif %}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %};{% endfor %}a:"
)
IN_TEXTS = TEMPLATE.replace("if m.content is string", "if m.role == 'tool' or m.content is string")  # as many have it
FIRST, SECOND, THIRD = image_file(40, 31), image_file(25, 60, "L"), image_file(9, 33)
PROMPT = "u:<image>look;a:peek;t:one <image> and <image>;u:<image>now?;a:"
SEEN = [FIRST, SECOND, THIRD, FIRST]


@pytest.fixture(scope="module")
def eyes(llava: Seeing) -> Iterator[Served]:
    with serving(llava, template=TEMPLATE, names=["eyes"]) as served:
        yield served


@pytest.fixture(scope="module")
def expected(llava: Seeing) -> str:
    """What the library says of the same images, and of no others."""
    with Decoder.open(llava.bundle, max_batch=1) as decoder:
        params = SamplingParams(max_new_tokens=12, temperature=0)
        orders = [SEEN, [SECOND, FIRST, THIRD, FIRST], [FIRST, THIRD, SECOND, FIRST], [FIRST, FIRST, SECOND, THIRD]]
        texts = [decoder.generate(PROMPT, params, images=[order])[0].text for order in orders]
    assert len({*texts}) == len(texts), "the text goes by the order"
    return texts[0]


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def of_chat(content: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(content)}"}}


def of_response(content: bytes) -> dict[str, Any]:
    return {"type": "input_image", "image_url": f"data:image/png;base64,{encoded(content)}"}


def of_message(content: bytes) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded(content)}}


def said(text: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": text}


def chat() -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "peek", "arguments": "{}"}}
    gave = [said("one "), of_chat(SECOND), said(" and "), of_chat(THIRD)]
    turns = [
        {"role": "user", "content": [of_chat(FIRST), said("look")]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": gave},
        {"role": "user", "content": [of_chat(FIRST), said("now?")]},
    ]
    return {"model": "eyes", "max_tokens": 12, "temperature": 0, "messages": turns}


def response() -> dict[str, Any]:
    gave = [said("one ", "input_text"), of_response(SECOND), said(" and ", "input_text"), of_response(THIRD)]
    items = [
        {"role": "user", "content": [of_response(FIRST), said("look", "input_text")]},
        {"type": "function_call", "call_id": "c", "name": "peek", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": gave},
        {"role": "user", "content": [of_response(FIRST), said("now?", "input_text")]},
    ]
    return {"model": "eyes", "max_output_tokens": 12, "temperature": 0, "input": items}


def message(*, result_first: bool = True) -> dict[str, Any]:
    gave = [said("one "), of_message(SECOND), said(" and "), of_message(THIRD)]
    result = {"type": "tool_result", "tool_use_id": "c", "content": gave}
    rest = [of_message(FIRST), said("now?")]
    turns = [
        {"role": "user", "content": [of_message(FIRST), said("look")]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "peek", "input": {}}]},
        {"role": "user", "content": [result, *rest] if result_first else [*rest, result]},
    ]
    return {"model": "eyes", "max_tokens": 12, "temperature": 0, "messages": turns}


def test_chats_see_images_in_what_tools_gave(eyes: Served, expected: str):
    answer = eyes.post("/v1/chat/completions", chat()).json()
    assert answer["choices"][0]["message"]["content"] == expected


def test_responses_see_images_in_what_functions_gave(eyes: Served, expected: str):
    answer = eyes.post("/v1/responses", response()).json()
    assert answer["output"][0]["content"][0]["text"] == expected


@pytest.mark.parametrize("result_first", [True, False])
def test_messages_see_images_in_results_of_tools(eyes: Served, expected: str, result_first: bool):
    """Results are shown before what else a turn says, and so are their images."""
    body = message(result_first=result_first)
    answer = eyes.post("/v1/messages", body).json()
    assert answer["content"][0]["text"] == expected
    asked = {name: value for name, value in body.items() if name not in ("max_tokens", "temperature")}
    counted = eyes.post("/v1/messages/count_tokens", asked).json()
    assert counted["input_tokens"] == sum(answer["usage"][name] for name in ("input_tokens", "cache_read_input_tokens"))


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", chat(), "messages"),
        ("/v1/responses", response(), "input"),
        ("/v1/messages", message(), ""),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_template_that_gives_them_no_place_is_named(llava: Seeing, path: str, body: dict[str, Any], field: str):
    with serving(llava, template=IN_TEXTS, names=["eyes"]) as served:
        answer = served.post(path, body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["message"].startswith("the chat template writes 2 places for 4 images; give one that knows images")
    assert error.get("param", "") == field
