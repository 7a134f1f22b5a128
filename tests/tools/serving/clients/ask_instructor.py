"""Asks by instructor for an object of a pydantic model, by a format and by a tool, whole and while it is written."""

import json
import sys
from typing import Literal

import anthropic
import instructor
import openai
from instructor import Mode
from pydantic import BaseModel

url = sys.argv[1]


class Answer(BaseModel, extra="forbid"):
    """does it"""

    n: Literal["a", "b"]


openai_client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
anthropic_client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
CLIENTS = {
    "format": instructor.from_openai(openai_client, mode=Mode.JSON_SCHEMA),
    "tool": instructor.from_openai(openai_client, mode=Mode.TOOLS),
    "messages": instructor.from_anthropic(anthropic_client, mode=Mode.ANTHROPIC_TOOLS),
}
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "abc"}], "max_tokens": 200, "max_retries": 0}
ASK |= {"response_model": Answer, "extra_body": {"seed": 3, "rule": "coupled"}}


responses = instructor.from_openai(openai_client, mode=Mode.RESPONSES_TOOLS)  # of which it shows no object in parts


def said(client) -> list:
    *_, last = client.create_partial(**ASK)
    return [one.model_dump() for one in (client.create(**ASK), last)]


seen = {way: said(client) for way, client in CLIENTS.items()}
print(json.dumps(seen | {"response": responses.create(**ASK).model_dump()}))
