"""Asks by LiteLLM, as it calls servers that speak OpenAI's and Anthropic's API."""

import asyncio
import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices

import litellm

litellm.suppress_debug_info = True
url, tools, form = sys.argv[1], *map(json.loads, sys.argv[2:])
COMMON = {"messages": [{"role": "user", "content": "abc"}], "api_key": "none", "max_tokens": 200, "num_retries": 0}
COMMON |= {"rule": "coupled", "seed": 3}
OPENAI = {"model": "openai/tiny", "api_base": f"{url}/v1"} | COMMON
ANTHROPIC = {"model": "anthropic/tiny", "api_base": url, "allowed_openai_params": ["seed"]} | COMMON


def text(answer) -> str:
    return answer.choices[0].message.content


def calls(answer) -> list:
    made = answer.choices[0].message.tool_calls
    return [[call.function.name, json.loads(call.function.arguments)] for call in made]


def streamed(**asked) -> object:
    return litellm.stream_chunk_builder(list(litellm.completion(stream=True, **asked)))


def said(asked: dict) -> dict:
    stream = streamed(**asked, stream_options={"include_usage": True})
    whole = litellm.completion(**asked)
    required = asked | {"tools": tools, "tool_choice": "required"}
    return {
        "whole": text(whole),
        "streamed": text(stream),
        "usage": [[one.usage.prompt_tokens, one.usage.completion_tokens] for one in (whole, stream)],
        "awaited": text(asyncio.run(litellm.acompletion(**asked))),
        "format": json.loads(text(litellm.completion(**asked, response_format=form))),
        "any": calls(litellm.completion(**required)),
        "any, streamed": calls(streamed(**required)),
    }


def refused() -> list:
    try:
        litellm.completion(**OPENAI, best_of=2)
    except litellm.BadRequestError as error:
        return [error.status_code, "best_of is refused" in str(error)]
    return []


print(json.dumps({"openai": said(OPENAI), "anthropic": said(ANTHROPIC), "refused": refused()}))
