"""Asks by LangChain: OpenAI's chats and Responses, and Anthropic's Messages."""

import asyncio
import json
import sys
from typing import Literal

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

url = sys.argv[1]


class Answer(BaseModel, extra="forbid"):
    n: Literal["a", "b"]


class add(Answer):
    """does it"""


class take_away(Answer):
    """does it"""


COMMON = {"model": "tiny", "api_key": "none", "max_retries": 0, "max_tokens": 200}
BEYOND = {"seed": 3, "rule": "coupled"}
MODELS = {
    "chat": ChatOpenAI(base_url=f"{url}/v1", stream_usage=True, extra_body=BEYOND, **COMMON),
    "responses": ChatOpenAI(base_url=f"{url}/v1", use_responses_api=True, extra_body=BEYOND, **COMMON),
    "messages": ChatAnthropic(base_url=url, model_kwargs={"extra_body": BEYOND}, **COMMON),
}


def streamed(model, asked):
    whole = None
    for chunk in model.stream(asked):
        whole = chunk if whole is None else whole + chunk
    return whole


def calls(message: AIMessage) -> list:
    return [[call["name"], call["args"]] for call in message.tool_calls]


def said(model) -> dict:
    stream, first = streamed(model, "abc"), model.bind_tools([add, take_away], tool_choice="any").invoke("abc")
    named = model.bind_tools([add, take_away], tool_choice="take_away")
    result = ToolMessage("3", tool_call_id=first.tool_calls[0]["id"])
    whole = model.invoke("abc")
    return {
        "whole": whole.text,
        "streamed": stream.text,
        "usage": [[one.usage_metadata[f"{kind}_tokens"] for kind in ("input", "output")] for one in (whole, stream)],
        "format": model.with_structured_output(Answer, method="json_schema").invoke("abc").model_dump(),
        "any": calls(first),
        "named": calls(named.invoke("abc")),
        "named, streamed": calls(streamed(named, "abc")),
        "result": model.invoke([HumanMessage("abc"), first, result]).text,
        "on": model.invoke([HumanMessage("abc"), AIMessage("yes"), HumanMessage("on")]).text,
    }


async def at_once() -> list[str]:
    return [one.text for one in await asyncio.gather(*(model.ainvoke("abc") for model in MODELS.values()))]


print(json.dumps({kind: said(model) for kind, model in MODELS.items()} | {"at once": asyncio.run(at_once())}))
