"""POST /v1/chat/completions: the template's prompt, in the shapes of OpenAI's API, whole and streamed."""

import pytest
from trt_spec.runtime import Decoder, SamplingParams

from ...kit.bundles import Pair
from .conftest import Served, serving

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "abc"}]
WRITTEN = "s0be brief1u0abc1a0"
GREEDY = {"model": "tiny", "temperature": 0, "max_completion_tokens": 20}


def said(alone: Decoder, written: str = WRITTEN, **params: object):
    ids = alone.tokenizer.encode(written, add_special_tokens=False).ids
    [output] = alone.generate([ids], SamplingParams(**({"max_new_tokens": 20} | params)), draft_length=0)
    return output


def test_the_whole_answer_has_the_shape_of_the_api(served: Served, alone: Decoder):
    answer = served.openai.chat.completions.create(messages=MESSAGES, **GREEDY)
    [choice] = answer.choices
    assert (answer.object, answer.id[:9]) == ("chat.completion", "chatcmpl-")
    assert (choice.message.role, choice.message.content) == ("assistant", said(alone).text)
    assert (choice.finish_reason, choice.logprobs) == ("length", None)
    assert answer.usage.prompt_tokens == len(alone.tokenizer.encode(WRITTEN).ids)
    assert answer.usage.completion_tokens == 20


def test_a_stream_begins_with_the_role_and_ends_with_finish_usage_and_done(served: Served, alone: Decoder):
    stream = served.openai.chat.completions.create(
        messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    first, *middle, finish, usage = list(stream)
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert all(chunk.choices[0].delta.role is None for chunk in middle)
    assert "".join(chunk.choices[0].delta.content for chunk in middle) == said(alone).text
    assert (finish.choices[0].finish_reason, finish.choices[0].delta.content) == ("length", None)
    assert (usage.choices, usage.usage.completion_tokens) == ([], 20)
    assert {chunk.object for chunk in (first, *middle, finish, usage)} == {"chat.completion.chunk"}


@pytest.mark.parametrize("stream", [False, True])
def test_log_probs_come_as_text_and_bytes_for_every_token(served: Served, alone: Decoder, stream: bool):
    asked = GREEDY | {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3, "stream": stream}
    answer = served.openai.chat.completions.create(**asked)
    parts = [chunk.choices[0].logprobs for chunk in answer] if stream else [answer.choices[0].logprobs]
    content = [one for part in parts if part for one in part.content]
    expected = said(alone, logprobs=3)
    assert [one.logprob for one in content] == pytest.approx([one.logprob for one in expected.logprobs], abs=1e-4)
    assert b"".join(bytes(one.bytes) for one in content).decode() == expected.text
    assert [one.token for one in content] == [alone.tokenizer.decode([token]) for token in expected.token_ids]
    assert {len(one.top_logprobs) for one in content} == {3}


@pytest.mark.parametrize("stream", [False, True])
def test_n_answers_come_under_their_own_index(served: Served, alone: Decoder, stream: bool):
    asked = {"model": "tiny", "messages": MESSAGES, "n": 3, "seed": 4, "max_tokens": 9, "stream": stream}
    answer = served.openai.chat.completions.create(extra_body={"rule": "coupled"}, **asked)
    texts = [""] * 3
    if stream:
        for chunk in answer:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    else:
        texts = [choice.message.content for choice in answer.choices]
    assert texts[0] == said(alone, temperature=1.0, rule="coupled", seed=4, max_new_tokens=9).text
    assert len(set(texts)) == 3


def test_without_a_limit_the_answer_may_fill_the_context(served: Served):
    answer = served.openai.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.total_tokens == served.service.max_length


def test_contents_in_parts_are_one_text_and_a_developer_is_the_system(served: Served):
    parts = [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]
    found = served.post("/tokenize", {"messages": [{"role": "developer", "content": parts}], "return_token_strs": True})
    assert "".join(found.json()["token_strs"]) == "s0be\nbrief1a0"


def test_an_answer_of_the_client_can_go_back_as_it_came(served: Served):
    answer = served.openai.chat.completions.create(messages=MESSAGES, **GREEDY)
    more = [*MESSAGES, answer.choices[0].message, {"role": "user", "content": "go on"}]
    assert served.openai.chat.completions.create(messages=more, **GREEDY).choices


def test_a_bundle_without_a_template_refuses_chats_in_a_sentence(llama: Pair):
    with serving(llama, template=None) as server:
        response = server.post("/v1/chat/completions", {"messages": MESSAGES})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["message"].startswith("this bundle has no chat template, so messages cannot become a prompt;")
        assert error["code"] == "no_chat_template"
