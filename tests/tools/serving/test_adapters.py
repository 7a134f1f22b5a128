"""Adapters are served as models by their names, and loaded and unloaded while the server runs, if that is allowed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ...kit.adapters import Adapted
from .conftest import Served, serving

PROMPT = [5, 9, 17, 5, 9, 20, 33]
BODY = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def loading(adapted: Adapted) -> Iterator[Served]:
    root = adapted.folders["wide"].parent
    with serving(adapted.pair, adapters=[("wide", adapted.folders["wide"])], adapter_root=root) as server:
        yield server


def said(server: Served, model: str | None) -> list[int]:
    answer = server.http.post("/v1/completions", json=BODY | {"model": model})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return answer.json()["choices"][0]["token_ids"]


def test_a_request_names_an_adapter_as_its_model(loading: Served, adapted: Adapted) -> None:
    assert tuple(said(loading, "wide")) == adapted.said("wide", PROMPT, 12)
    assert tuple(said(loading, loading.service.name)) == adapted.said(None, PROMPT, 12)
    cards = loading.http.get("/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [
        (loading.service.name, None),
        ("wide", loading.service.name),
    ]
    assert loading.http.get("/v1/models/wide").json()["id"] == "wide"
    refused = loading.http.post("/v1/completions", json=BODY | {"model": "narrow"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    page = loading.http.get("/metrics").text
    assert 'trt_spec:adapter_accepted_tokens_total{adapter="wide"' in page


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 4}),
        ("/v1/responses", {"input": "abc", "max_output_tokens": 16}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 4}),
    ],
)
def test_every_api_takes_it(adapted: Adapted, path: str, body: dict) -> None:
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    with serving(adapted.pair, template=template, adapters=[*adapted.folders.items()]) as server:
        texts = set()
        for model in ("wide", "narrow", server.service.name):
            answer = server.http.post(path, json=body | {"model": model, "temperature": 0})
            assert (answer.status_code, answer.json()["model"]) == (200, model), answer.text
            texts.add(str(answer.json().get("choices") or answer.json().get("output") or answer.json()["content"]))
        by_adapter = server.service.decoder.by_adapter
        assert set(by_adapter) == {"wide", "narrow"}
        assert len(texts) == 3


def test_one_is_loaded_and_unloaded_while_the_server_runs(loading: Served, adapted: Adapted) -> None:
    load = {"lora_name": "late", "lora_path": str(adapted.folders["narrow"])}
    assert loading.http.post("/v1/load_lora_adapter", json=load).status_code == 200
    assert tuple(said(loading, "late")) == adapted.said("narrow", PROMPT, 12)
    again = loading.http.post("/v1/load_lora_adapter", json=load)
    assert (again.status_code, "'late' is served already" in again.json()["error"]["message"]) == (400, True)
    assert loading.http.post("/v1/unload_lora_adapter", json={"lora_name": "late"}).status_code == 200
    assert loading.http.post("/v1/completions", json=BODY | {"model": "late"}).status_code == 404
    assert loading.http.post("/v1/unload_lora_adapter", json={"lora_name": "late"}).status_code == 404


def test_clients_unload_only_what_clients_have_loaded(loading: Served, adapted: Adapted) -> None:
    answer = loading.http.post("/v1/unload_lora_adapter", json={"lora_name": "wide"})
    assert (answer.status_code, "is the server's own" in answer.json()["error"]["message"]) == (400, True)
    assert tuple(said(loading, "wide")) == adapted.said("wide", PROMPT, 12)


@pytest.mark.parametrize("path", ["/etc", "../../..", "narrow/adapter_config.json", "absent", "a\0b"])
def test_nothing_is_loaded_from_elsewhere(loading: Served, path: str) -> None:
    answer = loading.http.post("/v1/load_lora_adapter", json={"lora_name": "other", "lora_path": path})
    assert answer.status_code == 400
    assert "is no folder that this server may load adapters from" in answer.json()["error"]["message"]


def test_clients_load_nothing_unless_that_is_allowed(adapted: Adapted, tmp_path: Path) -> None:
    with serving(adapted.pair) as server:
        answer = server.http.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": str(tmp_path)})
        assert answer.status_code == 404
        assert "start it with --adapters-from" in answer.json()["error"]["message"]
        assert "/v1/load_lora_adapter" not in server.http.get("/openapi.json").json()["paths"]
