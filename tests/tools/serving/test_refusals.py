"""What is wrong is refused with the right status, the field at fault and a sentence; nothing is ignored."""

import json

import openai
import pytest
from trt_spec.tools.serving.app import UNSERVED
from trt_spec.tools.serving.bodies import LATER
from trt_spec.tools.serving.guard import MOST_BODY_BYTES

from ...kit.bundles import Pair
from .conftest import Served, serving

MESSAGES = [{"role": "user", "content": "abc"}]
PATHS = {"/v1/completions": {"prompt": "abc"}, "/v1/chat/completions": {"messages": MESSAGES}}


def refusal(served: Served, path: str, status: int = 400, **fields: object) -> dict:
    response = served.post(path, PATHS.get(path, {}) | fields)
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("field", LATER)
def test_a_field_of_the_api_that_is_not_supported_is_refused_by_name_and_reason(served: Served, path: str, field: str):
    error = refusal(served, path, **{field: {}})
    assert error["message"] == f"{field} is refused: {LATER[field]}; leave it out"
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        ("/v1/completions", {"frobnicate": 1}, "frobnicate", "frobnicate is not a field of this request; leave it out"),
        (
            "/v1/completions",
            {"max_tokens": "9"},
            "max_tokens",
            "max_tokens is refused: expected `int | null`, got",
        ),
        ("/v1/completions", {"temperature": 3}, "temperature", "temperature is refused: expected `float` <= 2.0"),
        ("/v1/completions", {"temperature": 1e-7}, "temperature", "temperature is 1e-07, expected 0 or a number from"),
        ("/v1/completions", {"stop": [""]}, "stop[0]", "stop[0] is refused: expected `str` of length >= 1"),
        ("/v1/completions", {"logit_bias": {"a": 1}}, "logit_bias", "logit_bias has the key 'a', expected a token id"),
        (
            "/v1/completions",
            {"logit_bias": {"999": 1}},
            "logit_bias",
            "logit_bias token id 999 is outside the vocabulary",
        ),
        ("/v1/completions", {"min_tokens": 99}, "min_tokens", "min_tokens is 99, expected a whole number from 0 to 16"),
        ("/v1/completions", {"stream_options": {}}, "stream_options", "stream_options says how to stream, but stream"),
        ("/v1/completions", {"prompt": ["a", 5]}, "prompt", "prompt mixes text and token ids"),
        ("/v1/completions", {"prompt": []}, "prompt", "prompt is refused: expected `array` of length >= 1"),
        ("/v1/completions", {"prompt": ""}, "prompt", "the prompt is empty; give at least one token"),
        ("/v1/completions", {"prompt": [2**40]}, "prompt[0]", "prompt[0] is refused: expected `int` <= 2147483647"),
        ("/v1/completions", {"prompt": [2**30], "echo": True}, "prompt", "prompt token id 1073741824 is outside"),
        ("/v1/completions", {"prompt": [64]}, "prompt", "prompt token id 64 is outside the vocabulary of 64 tokens"),
        ("/v1/completions", {"prompt": "a" * 256}, "prompt", "the prompt has 256 tokens and max_tokens is 1"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 999}, "prompt", "the prompt has 1 token and max_tokens is"),
        ("/v1/completions", {"max_tokens": 999}, "prompt", "the prompt has 3 tokens and max_tokens is 999, the model"),
        ("/v1/completions", {"drafter": "oracle"}, "drafter", "drafter is 'oracle', expected one of"),
        (
            "/v1/completions",
            {"draft_length": 17},
            "draft_length",
            "draft_length is 17, expected auto, a whole",
        ),
        ("/v1/completions", {"draft_length": "1x" * 100_000 + "1"}, "draft_length", "draft_length is refused: "),
        ("/v1/chat/completions", {"messages": []}, "messages", "messages is refused: expected `array` of length >= 1"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "judge"}]},
            "messages[0].role",
            "invalid enum value 'judge', expected assistant, developer, system, tool, user",
        ),
        ("/v1/completions", {"rule": "fair"}, "rule", "'fair', expected coupled, rejection, tokenwise"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a", "function_call": {}}]},
            "messages[0].function_call",
            "messages[0].function_call is refused: functions are not supported",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].image_url.url",
            "messages[0].content[0].image_url.url is missing",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            "messages",
            "the model reads text alone; leave images out of the content",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
            "messages[0].content[0].type",
            "messages[0].content[0].type is refused: invalid value 'input_audio', expected image_url, text",
        ),
        ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs", "top_logprobs says how many log-probabilities"),
        (
            "/v1/chat/completions",
            {"max_tokens": 2, "max_completion_tokens": 2},
            "max_tokens",
            "mean the same; send one",
        ),
        ("/tokenize", {}, "prompt", "prompt and messages exclude each other, and one is needed"),
        ("/detokenize", {}, "tokens", "tokens is missing; it is required"),
        ("/detokenize", {"tokens": [64]}, "tokens", "token id 64 is outside the vocabulary of 64 tokens"),
    ],
)
def test_a_wrong_field_is_named_by_its_path(served: Served, path: str, fields: dict, param: str | None, message: str):
    error = refusal(served, path, **fields)
    assert message in error["message"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


def test_another_model_and_another_path_are_not_found(served: Served):
    error = refusal(served, "/v1/completions", 404, model="gpt-9")
    assert error["message"] == "model 'gpt-9' is not served here, expected 'tiny'"
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "/v1/engines is not a path" in refusal(served, "/v1/engines", 404)["message"]
    response = served.http.get("/v1/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert "GET is not a method of /v1/completions" in response.json()["error"]["message"]
    assert served.http.get("/v1/models/other").status_code == 404


@pytest.mark.parametrize(
    ("content", "kind", "status", "message"),
    [
        (b"{", "application/json", 400, "the body is not JSON"),
        (b"", "application/json", 400, "the body is not JSON"),
        (b'{"prompt": "\\ud800"}', "application/json", 400, "the body is not JSON"),
        (b'{"prompt": "\xff"}', "application/json", 400, "the body is not JSON"),
        (b"[]", "application/json", 400, "the body is refused: expected `object`, got `array`"),
        (b"[" * 100_000, "application/json", 400, "the body is refused"),
        (b'{"prompt": ' + b"[" * 100_000, "application/json", 400, "is refused: "),
        (b'{"prompt": "a"}', "text/plain", 415, "the body is of the type text/plain, expected application/json"),
        (b'{"prompt": "a"}', "", 415, "the body is of the type unknown, expected application/json"),
    ],
)
def test_a_broken_body_is_refused(served: Served, content: bytes, kind: str, status: int, message: str):
    response = served.http.post("/v1/completions", content=content, headers={"content-type": kind})
    assert response.status_code == status
    assert message in response.json()["error"]["message"]


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_large_is_refused_before_it_is_read(served: Served, announced: bool):
    content = b" " * (MOST_BODY_BYTES + 1)
    chunks = content if announced else iter([content[:-1], content[-1:]])
    response = served.http.post("/v1/completions", content=chunks, headers={"content-type": "application/json"})
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "body_too_large"


def test_without_a_key_everything_but_health_is_401(llama: Pair):
    with serving(llama, keys=["first", "second"]) as server:
        for path in ("/health", "/ready"):
            assert server.http.get(path).status_code == 200
        asks = [("GET", path) for path in ("/v1/models", "/metrics", "/openapi.json", "/nowhere", "/health/")]
        asks += [("POST", path) for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")]
        for method, path in asks:
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic first"}):
                response = server.http.request(method, path, headers=headers)
                assert response.status_code == 401, path
                assert response.headers["www-authenticate"] == "Bearer"
                assert response.json()["error"]["code"] == "invalid_api_key"
        for key in ("first", "second"):
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key)
            assert [model.id for model in client.models.list()] == ["tiny"]
        with pytest.raises(openai.AuthenticationError):
            server.openai.models.list()


@pytest.mark.parametrize("path", UNSERVED)
def test_what_other_servers_have_beside_text_is_refused_by_name_and_reason(served: Served, path: str):
    error = refusal(served, path, 404, input="abc")
    assert error["message"] == f"{path} is not served: {UNSERVED[path]}"


def test_no_other_site_is_let_in(served: Served):
    headers = {"origin": "https://elsewhere.example", "access-control-request-method": "POST"}
    response = served.http.options("/v1/completions", headers=headers)
    assert response.status_code == 405
    assert not any(name.startswith("access-control") for name in response.headers)


def test_the_errors_of_openais_client_carry_the_field(served: Served):
    with pytest.raises(openai.BadRequestError) as error:
        served.openai.chat.completions.create(model="tiny", messages=MESSAGES, verbosity="low")
    assert (error.value.param, error.value.code) == ("verbosity", "unsupported_parameter")
    assert json.loads(error.value.response.text)["error"]["type"] == "invalid_request_error"
