"""POST /v1/completions says what the decoder says, in the shapes of OpenAI's API, whole and streamed."""

import pytest
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.tools.serving.sampling_fields import seed_of_choice

from .conftest import Served

GREEDY = {"temperature": 0, "max_tokens": 20}
COUPLED = {"max_tokens": 20, "seed": 3, "extra_body": {"rule": "coupled"}}
PROMPT = "abcd"


def said(alone: Decoder, prompt: object = PROMPT, **params: object) -> str:
    [output] = alone.generate(prompt, SamplingParams(**({"max_new_tokens": 20} | params)), draft_length=0)
    return output.text


def test_the_whole_answer_has_the_shape_of_the_api(served: Served, alone: Decoder):
    answer = served.openai.completions.create(model="tiny", prompt=PROMPT, **GREEDY)
    [choice] = answer.choices
    assert answer.object == "text_completion"
    assert (answer.id[:5], answer.model) == ("cmpl-", "tiny")
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, said(alone), "length", None)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (4, 20, 24)


def test_a_stream_adds_up_to_the_whole_and_ends_with_finish_usage_and_done(served: Served, alone: Decoder):
    chunks = list(
        served.openai.completions.create(
            model="tiny", prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == said(alone)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == 24
    assert len({(chunk.id, chunk.created, chunk.object) for chunk in chunks}) == 1
    body = {"prompt": PROMPT, "stream": True, "max_tokens": 3}
    with served.http.stream("POST", "/v1/completions", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]"
    assert '"usage"' not in "".join(lines)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "extra", "params"),
    [
        ({"temperature": 0.7, "top_p": 0.8}, {}, {"temperature": 0.7, "top_p": 0.8}),
        ({"presence_penalty": 1.5}, {}, {"presence_penalty": 1.5}),
        ({"frequency_penalty": -1.5}, {}, {"frequency_penalty": -1.5}),
        ({"logit_bias": {"30": 50}}, {}, {"logit_bias": {30: 50}}),
        ({"stop": "b"}, {}, {"stop": "b"}),
        ({"stop": ["e", "f"]}, {}, {"stop": ["e", "f"]}),
        ({}, {"top_k": 2}, {"top_k": 2}),
        ({}, {"top_k": -1}, {}),
        ({}, {"min_p": 0.3}, {"min_p": 0.3}),
        ({}, {"repetition_penalty": 2.0}, {"repetition_penalty": 2.0}),
        (
            {"logit_bias": {"9": 100}},
            {"stop_token_ids": [9], "min_tokens": 4},
            {"logit_bias": {9: 100}, "stop_token_ids": [9], "min_tokens": 4},
        ),
        ({"logit_bias": {"1": 100}}, {"ignore_eos": True}, {"logit_bias": {1: 100}, "ignore_eos": True}),
        ({}, {"draft_length": 0}, {}),
        ({}, {"draft_length": 7, "drafter": "lookup"}, {}),
        ({}, {"draft_length": "3+2"}, {}),
        ({}, {"draft_length": "2/5"}, {}),
        ({}, {"draft_length": "2x2"}, {}),
        ({"user": "me"}, {"metadata": {"a": "b"}, "store": False, "cache_salt": "x", "service_tier": "auto"}, {}),
        ({}, {"top_p": None, "n": None, "stop": None}, {}),
    ],
)
def test_every_field_means_what_it_means_to_the_decoder(
    served: Served, alone: Decoder, stream: bool, fields: dict, extra: dict, params: dict
):
    asked = COUPLED | {"extra_body": COUPLED["extra_body"] | extra} | fields
    answer = served.openai.completions.create(model="tiny", prompt=PROMPT, stream=stream, **asked)
    text = "".join(chunk.choices[0].text for chunk in answer) if stream else answer.choices[0].text
    assert text == said(alone, **({"temperature": 1.0, "rule": "coupled", "seed": 3} | params))


def test_the_defaults_are_those_of_the_api(served: Served, alone: Decoder):
    body = {"prompt": PROMPT, "seed": 5}
    answer = served.post("/v1/completions", body).json()
    [output] = alone.generate(PROMPT, SamplingParams(max_new_tokens=16, temperature=1.0, seed=5))
    assert answer["choices"][0]["text"] == output.text
    assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "single"),
    [("ab", ["ab"]), ([5, 6, 7], [[5, 6, 7]]), (["ab", "cd"], ["ab", "cd"]), ([[5, 6], [7]], [[5, 6], [7]])],
)
def test_prompts_are_text_or_token_ids_one_or_several(served: Served, alone: Decoder, prompt: object, single: list):
    answer = served.openai.completions.create(model="tiny", prompt=prompt, **GREEDY)
    assert [choice.text for choice in answer.choices] == [said(alone, one) for one in single]
    assert [choice.index for choice in answer.choices] == list(range(len(single)))


@pytest.mark.parametrize("stream", [False, True])
def test_n_choices_have_seeds_of_their_own_and_share_one_prompt_in_usage(served: Served, alone: Decoder, stream: bool):
    body = {"prompt": [PROMPT, "xyz"], "n": 2, "max_tokens": 12, "seed": 8, "rule": "coupled", "stream": stream}
    texts = [""] * 4
    if stream:
        body["stream_options"] = {"include_usage": True}
        extra = {name: body.pop(name) for name in ("rule",)}
        for chunk in served.openai.completions.create(model="tiny", extra_body=extra, **body):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
            usage = chunk.usage.model_dump(exclude_none=True) if chunk.usage else None
    else:
        answer = served.post("/v1/completions", body).json()
        texts, usage = [choice["text"] for choice in answer["choices"]], answer["usage"]
    params = {"temperature": 1.0, "rule": "coupled", "max_new_tokens": 12}
    assert texts == [
        said(alone, prompt, seed=seed_of_choice(8, choice), **params) for prompt in (PROMPT, "xyz") for choice in (0, 1)
    ]
    assert seed_of_choice(8, 0) == 8 != seed_of_choice(8, 1)
    counts = {"prompt_tokens": 7, "completion_tokens": 48, "total_tokens": 55}
    assert usage == counts | {"prompt_tokens_details": {"cached_tokens": 0}}


@pytest.mark.parametrize("stream", [False, True])
def test_log_probs_are_the_decoders_for_every_token_in_streams_too(served: Served, alone: Decoder, stream: bool):
    body = {"model": "tiny", "prompt": PROMPT, "logprobs": 2, "stream": stream} | GREEDY
    answer = served.openai.completions.create(**body)
    parts = [chunk.choices[0].logprobs for chunk in answer] if stream else [answer.choices[0].logprobs]
    parts = [part for part in parts if part is not None]
    [output] = alone.generate(PROMPT, SamplingParams(max_new_tokens=20, logprobs=2))
    found = [value for part in parts for value in part.token_logprobs]
    assert found == pytest.approx([one.logprob for one in output.logprobs], abs=1e-4)
    assert "".join(token for part in parts for token in part.tokens) == output.text
    offsets = [offset for part in parts for offset in part.text_offset]
    assert offsets == [len("".join([t for p in parts for t in p.tokens][:at])) for at in range(20)]
    top = [entry for part in parts for entry in part.top_logprobs]
    assert all(max(entry.values()) == pytest.approx(value, abs=1e-6) for entry, value in zip(top, found, strict=True))
    assert {len(entry) for entry in top} == {2}


def test_echo_puts_the_prompt_before_the_text(served: Served, alone: Decoder):
    whole = served.openai.completions.create(model="tiny", prompt=PROMPT, echo=True, **GREEDY)
    assert whole.choices[0].text == PROMPT + said(alone)
    ids = alone.tokenizer.encode(PROMPT).ids
    chunks = served.openai.completions.create(model="tiny", prompt=ids, echo=True, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT + said(alone)
    nothing = served.openai.completions.create(model="tiny", prompt=PROMPT, echo=True, max_tokens=0)
    assert (nothing.choices[0].text, nothing.choices[0].finish_reason) == (PROMPT, "length")
    assert (nothing.usage.completion_tokens, nothing.usage.total_tokens) == (0, len(ids))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_echoed_prompts_have_log_probs_as_evaluations_ask_for_them(
    served: Served, alone: Decoder, max_tokens: int, stream: bool
):
    prompts = [[5, 6, 7, 8], [9, 10]]
    asked = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0, "seed": 1234, "stream": stream}
    answer = served.openai.completions.create(model="tiny", prompt=prompts, **asked)
    parts = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
    params = SamplingParams(max_new_tokens=max(max_tokens, 1), logprobs=1, prompt_logprobs=1)
    for index, expected in enumerate(alone.generate(prompts, params)):
        mine = [part for part in parts if part.index == index]
        found = [value for part in mine if part.logprobs for value in part.logprobs.token_logprobs]
        best = [top and max(top.values()) for part in mine if part.logprobs for top in part.logprobs.top_logprobs]
        wanted = [*expected.prompt_logprobs, *expected.logprobs[:max_tokens]]
        assert (found[0], best[0]) == (None, None)
        assert found[1:] == pytest.approx([one.logprob for one in wanted[1:]], abs=1e-4)
        likeliest = [max(one.logprob, one.top[0][1]) for one in wanted[1:]]
        assert best[1:] == pytest.approx(likeliest, abs=1e-4)
        text = alone.tokenizer.decode(prompts[index]) + (expected.text if max_tokens else "")
        assert "".join(part.text for part in mine) == text


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_and_speculation_come_with_the_answer_if_asked_for(served: Served, alone: Decoder, stream: bool):
    body = {"prompt": PROMPT, "return_token_ids": True, "speculation": True, "draft_length": 3} | GREEDY
    [output] = alone.generate(PROMPT, SamplingParams(max_new_tokens=20), draft_length=3)
    if stream:
        chunks = served.openai.completions.create(
            model="tiny", prompt=PROMPT, stream=True, extra_body={k: body[k] for k in list(body)[1:4]}, **GREEDY
        )
        choices = [chunk.choices[0].model_dump() for chunk in chunks]
        tokens = [token for choice in choices for token in choice.get("token_ids") or []]
        speculation = choices[-1]["speculation"]
    else:
        [choice] = served.post("/v1/completions", body).json()["choices"]
        tokens, speculation = choice["token_ids"], choice["speculation"]
    assert tokens == list(output.token_ids)
    assert speculation == output.speculation.to_json() | {"lossless": True}
