"""Options beyond OpenAI's that clients of other servers send, each by what it does to the answer."""

import json
import re
import threading
from importlib.metadata import version

import pytest
from trt_spec.runtime import Decoder, SamplingParams

from ...kit.bundles import Pair
from ...kit.schemas import FORMAT, SCHEMA
from ...kit.waiting import until
from .conftest import TEMPLATE, Served, serving

MESSAGES = [{"role": "user", "content": "abc"}]
SEEDED = {"seed": 3, "rule": "coupled"}
CHAT = {"messages": MESSAGES, "max_completion_tokens": 40} | SEEDED
TEXT = {"prompt": "abc", "max_tokens": 40} | SEEDED
PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT}


def post(server: Served, path: str, body: dict) -> dict:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(choice: dict) -> str:
    return choice["text"] if "text" in choice else choice["message"]["content"]


def complete(server: Served, **asked: object) -> dict:
    [choice] = post(server, "/v1/completions", TEXT | asked)["choices"]
    return choice


def events(server: Served, path: str, body: dict) -> list[dict]:
    with server.http.stream("POST", path, json=body | {"stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def refusal(server: Served, path: str, body: dict) -> tuple[str, str]:
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["param"], answer.json()["error"]["message"]


# Streams.


@pytest.mark.parametrize("path", PATHS)
def test_usage_comes_with_each_chunk_and_grows_to_the_whole(server: Served, path: str):
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events(server, path, PATHS[path] | {"stream_options": options})
    written = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert written == sorted(written)
    assert written[-1] == last["usage"]["completion_tokens"] == 40
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}


@pytest.mark.parametrize("path", PATHS)
def test_obfuscation_varies_the_length_of_chunks(server: Served, path: str):
    chunks = events(server, path, PATHS[path] | {"stream_options": {"include_obfuscation": True}})
    assert len({len(chunk["obfuscation"]) for chunk in chunks}) > 1
    assert not any("obfuscation" in chunk for chunk in events(server, path, PATHS[path]))


@pytest.mark.parametrize("path", PATHS)
def test_the_tokens_of_prompt_and_answer_come_apart(server: Served, path: str):
    body = PATHS[path] | {"return_token_ids": True}
    whole = post(server, path, body)
    [choice] = whole["choices"]
    assert len(choice["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    assert server.decoder.tokenizer.decode(choice["token_ids"]) == text_of(choice)
    chunks = [chunk["choices"][0] for chunk in events(server, path, body)]
    assert [one["prompt_token_ids"] for one in chunks if "prompt_token_ids" in one] == [choice["prompt_token_ids"]]
    assert [token for one in chunks for token in one.get("token_ids", ())] == choice["token_ids"]


# What the model reads.


def test_a_last_message_goes_on_without_its_end(server: Served):
    messages = [*MESSAGES, {"role": "assistant", "content": "and so"}]
    asked = {"messages": messages, "continue_final_message": True}
    goes_on = post(server, "/v1/chat/completions", CHAT | asked)
    assert text_of(goes_on["choices"][0]) == complete(server, prompt="u0abc1a0and so")["text"]
    assert post(server, "/apply-template", asked)["prompt"] == "u0abc1a0and so"
    assert post(server, "/apply-template", {"messages": messages})["prompt"] == "u0abc1a0and so1a0"


def test_a_template_that_trims_is_continued_where_the_text_ends(signs: Pair):
    trims = TEMPLATE.replace("m.content", "m.content | trim")
    body = {"messages": [{"role": "assistant", "content": " and <eos> so"}], "continue_final_message": True}
    with serving(signs, template=trims) as server:
        assert post(server, "/apply-template", body)["prompt"] == "a0and <eos> so"
    asks = "{{ messages[0].content }}{% if add_generation_prompt %}?{% endif %}"
    with serving(signs, template=asks) as server:
        for asked, written in (({}, "abc?"), ({"add_generation_prompt": False}, "abc")):
            assert post(server, "/apply-template", {"messages": MESSAGES} | asked)["prompt"] == written
    with serving(signs, template="{{ messages[0].role }}") as server:
        assert refusal(server, "/apply-template", body)[0] == "continue_final_message"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "begins another"),
        ({"continue_final_message": True, "messages": [{"role": "user", "content": ""}]}, "no text to be continued"),
    ],
)
def test_a_message_that_cannot_be_continued_is_refused(server: Served, asked: dict, said: str):
    param, message = refusal(server, "/v1/chat/completions", CHAT | asked)
    assert param == "continue_final_message"
    assert said in message


def test_a_prompt_is_cut_at_its_beginning(server: Served):
    ids = server.decoder.tokenizer.encode("abcabcab").ids
    cut = complete(server, prompt=ids, truncate_prompt_tokens=3, echo=True, return_token_ids=True)
    assert cut["prompt_token_ids"] == ids[-3:]
    assert cut["text"] == complete(server, prompt=ids[-3:], echo=True)["text"]
    longest = server.service.max_length
    fits = complete(server, prompt=ids * longest, truncate_prompt_tokens=-1, max_tokens=7, return_token_ids=True)
    assert len(fits["prompt_token_ids"]) == longest - 7
    chat = post(server, "/v1/chat/completions", CHAT | {"truncate_prompt_tokens": 2})
    assert chat["usage"]["prompt_tokens"] == 2


# What the answer is.


def test_allowed_tokens_come_alone(server: Served):
    allowed = [server.decoder.tokenizer.encode(letter, add_special_tokens=False).ids[0] for letter in "ab"]
    for more in ({}, {"temperature": 0}, {"draft_length": "4+4"}, {"logit_bias": {str(allowed[0]): -100}}):
        choice = complete(server, allowed_token_ids=allowed, return_token_ids=True, **more)
        assert set(choice["token_ids"]) <= set(allowed), more
    assert set(choice["text"]) == {"b"}
    assert refusal(server, "/v1/completions", TEXT | {"allowed_token_ids": [10**6]})[0] == "allowed_token_ids"


def test_beams_search_for_the_likeliest_text(server: Served, signs: Pair):
    searched = {"temperature": 0, "num_beams": 4, "length_penalty": 0.5, "early_stopping": True}
    with Decoder.open(signs.bundle) as decoder:
        params = SamplingParams(max_new_tokens=40, num_beams=4, length_penalty=0.5, early_stopping=True)
        [expected] = decoder.generate("abc", params)
    for more in ({}, {"draft_length": 2}, {"drafter": "none"}):
        assert complete(server, **searched, **more)["text"] == expected.text
    said = [chunk["choices"][0]["text"] for chunk in events(server, "/v1/completions", TEXT | searched)]
    assert "".join(said) == expected.text
    assert refusal(server, "/v1/completions", TEXT | searched | {"n": 2})[0] == "n"
    assert refusal(server, "/v1/completions", TEXT | searched | {"temperature": 1})[0] == "temperature"


def test_allowed_tokens_are_distributed_as_the_targets_own(signs: Pair):
    allowed = list(range(60, 75))
    asked = {"max_new_tokens": 12, "temperature": 1.0, "rule": "coupled", "allowed_token_ids": allowed}
    with Decoder.open(signs.bundle, max_batch=2) as decoder:
        bias = {token: -float("inf") for token in range(decoder.vocab_size) if token not in allowed}
        for seed in range(4):
            one, other = (
                SamplingParams(**asked, seed=seed),
                SamplingParams(**asked | {"allowed_token_ids": ()}, seed=seed, logit_bias=bias),
            )
            first, second = decoder.generate(["abc", "abc"], [one, other])
            assert first.token_ids == second.token_ids


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_bad_words_never_occur_though_a_token_may_hold_them(server: Served, rule: str):
    free = complete(server, max_tokens=100)["text"]
    words = [re.search("[a-z]{2}", free)[0], "/", *set(re.findall("[^a-z]", free))][:40]
    words = [word for word in words if word != "\ufffd"]
    assert any(word in free for word in words)
    for seed in range(3):
        text = complete(server, max_tokens=100, bad_words=words, seed=seed, rule=rule)["text"]
        assert not [word for word in words if word in text]


WANTED = {
    "json_schema": {"json_schema": SCHEMA},
    "grammar, GBNF": {"grammar": 'root ::= "{\\"n\\": \\"" [ab] "\\"}"'},
    "grammar, Lark": {"grammar": 'start: "{\\"n\\": \\"" /[ab]/ "\\"}"'},
    "structured json": {"structured_outputs": {"json": SCHEMA}},
    "structured json as text": {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    "structured regex": {"structured_outputs": {"regex": r'\{"n": "[ab]"\}'}},
    "structured choice": {"structured_outputs": {"choice": ['{"n": "a"}', '{"n": "b"}']}},
    "structured grammar": {"structured_outputs": {"grammar": 'root ::= "{\\"n\\": \\"" [ab] "\\"}"'}},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", WANTED)
def test_a_form_is_kept_however_it_is_asked_for(server: Served, name: str, path: str):
    longest = {"max_completion_tokens" if "chat" in path else "max_tokens": 100}
    [choice] = post(server, path, PATHS[path] | WANTED[name] | longest)["choices"]
    assert json.loads(text_of(choice))["n"] in ("a", "b")
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("asked", "param", "said"),
    [
        ({"grammar": "root ::= b"}, "grammar", "cannot be compiled"),
        ({"structured_outputs": {}}, "structured_outputs", "expected one"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "has 2 of"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "cannot be compiled"),
        ({"json_schema": {}, "bad_words": ["x"]}, "json_schema", "json_schema and bad_words both say"),
        ({"response_format": FORMAT, "grammar": "root ::= 'a'"}, "response_format", "both say"),
        ({"json_schema": {"type": "strin"}}, "json_schema", "cannot be compiled"),
    ],
)
def test_a_form_that_means_nothing_is_refused_by_its_name(server: Served, asked: dict, param: str, said: str):
    found, message = refusal(server, "/v1/completions", TEXT | asked)
    assert found == param
    assert said in message


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_may_stay_and_is_named(server: Served, stream: bool):
    free = complete(server)["text"]
    stop = free[6:8]
    for keeps in (False, True):
        body = TEXT | {"stop": [stop], "include_stop_str_in_output": keeps}
        if stream:
            chunks = [chunk["choices"][0] for chunk in events(server, "/v1/completions", body)]
            text, reason = "".join(one["text"] for one in chunks), chunks[-1]["stop_reason"]
        else:
            choice = complete(server, **body)
            text, reason = choice["text"], choice["stop_reason"]
        at = free.index(stop)
        assert text == free[: at + (len(stop) if keeps else 0)]
        assert reason == stop


def test_the_token_that_stops_is_named_if_it_was_asked_for(server: Served):
    token = complete(server, return_token_ids=True)["token_ids"][5]
    stopped = complete(server, stop_token_ids=[token])
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", token)
    assert "stop_reason" not in complete(server)


def test_special_tokens_show_where_they_are_asked_for(server: Served):
    tokenizer = server.decoder.tokenizer
    special = sorted(server.service.spelling.special)[0]
    asked = {"logit_bias": {str(special): 100}, "max_tokens": 3, "ignore_eos": True}
    assert complete(server, **asked)["text"] == ""
    shown = complete(server, **asked, skip_special_tokens=False)["text"]
    assert shown.replace(" ", "") == tokenizer.id_to_token(special) * 3


def test_of_those_that_wait_the_lowest_priority_number_starts_first(signs: Pair):
    with serving(signs, max_batch=1) as server:
        ended: list[int] = []
        body = TEXT | {"max_tokens": 100, "ignore_eos": True, "prompt": "abcd"}

        def ask(priority: int) -> None:
            server.post("/v1/completions", body | {"priority": priority})
            ended.append(priority)

        decoder = server.decoder
        with decoder._step_lock:  # nothing starts before all wait
            threads = [threading.Thread(target=ask, args=[number]) for number in (0, 5, -1, 3)]
            for count, thread in enumerate(threads, 1):
                thread.start()
                until(lambda count=count: len(server.service.stepper.tickets) == count)
        for thread in threads:
            thread.join()
    assert ended == [-1, 0, 3, 5]


# The server.


def test_a_model_may_have_several_names(signs: Pair):
    with serving(signs, names=["tiny", "claude-tiny"]) as server:
        assert [one["id"] for one in server.http.get("/v1/models").json()["data"]] == ["tiny", "claude-tiny"]
        assert server.http.get("/v1/models/claude-tiny").json()["id"] == "claude-tiny"
        answers = [post(server, "/v1/completions", TEXT | {"model": name}) for name in ("tiny", "claude-tiny")]
        assert [one["model"] for one in answers] == ["tiny", "claude-tiny"]
        assert answers[0]["choices"] == answers[1]["choices"]
        refused = server.post("/v1/completions", TEXT | {"model": "other"})
        assert "expected 'tiny' or 'claude-tiny'" in refused.json()["error"]["message"]


def test_pages_of_an_origin_may_ask_only_where_that_was_opened(signs: Pair, server: Served):
    page = {"origin": "https://example.com"}
    wish = page | {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    with serving(signs, keys=["key"], origins=["https://example.com"]) as opened:
        assert opened.http.options("/v1/completions", headers=wish).status_code == 200
        answer = opened.http.post("/v1/completions", json=TEXT, headers=page | {"authorization": "Bearer key"})
        assert answer.headers["access-control-allow-origin"] == "https://example.com"
        refused = opened.http.post("/v1/completions", json=TEXT, headers=page)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://example.com")
        other = opened.http.post("/v1/completions", json=TEXT, headers={"origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers
    assert "access-control-allow-origin" not in server.http.post("/v1/completions", json=TEXT, headers=page).headers


def test_it_says_its_version(server: Served):
    assert server.http.get("/version").json() == {"version": version("trt-spec")}
