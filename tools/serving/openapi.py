"""The page /openapi.json, made from the structs that the server itself reads and writes."""

from collections.abc import Container
from importlib.metadata import version
from typing import Any

import msgspec

from . import answers, bodies, message_bodies, messages, prompt_bodies, response_bodies
from .errors import MESSAGES, ErrorAnswer, MessagesError
from .response_answers import CountedInput, ResponseAnswer
from .service import Service
from .sound_forms import FORM, Form
from .transcriptions import Transcription

PLACE = "#/components/schemas/{name}"
KEY: list[dict[str, list[str]]] = [{"key": []}]
SAID = {  # by status: what an error of this status says
    400: "A field is refused; param names it.",
    401: "There is no key, or a wrong one.",
    404: "There is no such model.",
    413: "The body is too large.",
    415: "The body is not application/json.",
    429: "The key has asked for as much as it may; Retry-After says when to come back.",
    500: "The server has failed.",
    503: "The server is full or shutting down; Retry-After says when to come back.",
}
POSTS: dict[str, tuple[str, type, type]] = {  # path: what it does, what it takes, what it gives
    "/v1/completions": ("Continue a prompt.", bodies.CompletionBody, answers.Answer[answers.CompletionChoice]),
    "/v1/chat/completions": ("Answer messages.", bodies.ChatBody, answers.Answer[answers.ChatChoice]),
    "/v1/responses": ("Answer messages.", response_bodies.ResponsesBody, ResponseAnswer),
    "/v1/chat/completions/input_tokens": ("Count what would be read.", bodies.ChatBody, answers.InputTokens),
    "/v1/responses/input_tokens": ("Count what would be read.", response_bodies.ResponsesBody, CountedInput),
    "/v1/messages": ("Answer messages.", message_bodies.MessagesBody, messages.MessageAnswer),
    "/v1/messages/count_tokens": ("Count what would be read.", message_bodies.CountedBody, answers.InputTokens),
    "/apply-template": ("Turn messages into a prompt.", prompt_bodies.ApplyTemplateBody, answers.Prompt),
    "/tokenize": ("Turn text or messages into token ids.", prompt_bodies.TokenizeBody, answers.Tokens),
    "/v1/load_lora_adapter": ("Load an adapter.", bodies.LoadAdapterBody, answers.Status),
    "/v1/unload_lora_adapter": ("Unload one.", bodies.UnloadAdapterBody, answers.Status),
    "/detokenize": ("Turn token ids into text.", prompt_bodies.DetokenizeBody, answers.Prompt),
}
HEARD: dict[str, str] = {  # path: what it does with the sound in a form
    "/v1/audio/transcriptions": "Write down what is said.",
    "/v1/audio/translations": "Write down in English what is said.",
}
GETS: dict[str, tuple[str, type | None]] = {
    "/v1/models": ("List the model.", answers.ModelList),
    "/v1/models/{model}": ("Describe the model.", answers.ModelCard),
    "/v1/responses/{response_id}": ("Return a response that was stored.", ResponseAnswer),
    "/health": ("Whether the server is alive.", answers.Status),
    "/ready": ("Whether the server takes requests.", answers.Status),
    "/version": ("The version of trt-spec.", answers.Version),
    "/metrics": ("Metrics for Prometheus.", None),
    "/openapi.json": ("This page.", None),
}
STREAMED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
EVENT = {  # of a stream; before version 3.2 of OpenAPI a stream's schema is that of each event
    "type": "object",
    "properties": {"data": {"type": "string", "description": "A chunk of the answer or an error, in JSON, or [DONE]."}},
    "required": ["data"],
}
WITHOUT_KEY = ("/health", "/ready")


def openapi_page(service: Service, with_keys: bool, served: Container[str]) -> dict[str, Any]:
    """Describe those paths that are `served` here."""
    kinds = [
        ErrorAnswer,
        MessagesError,
        *response_bodies.ITEMS.values(),
        *(kind for _, body, answer in POSTS.values() for kind in (body, answer)),
    ]
    kinds += [Form, Transcription]
    kinds += [answer for _, answer in GETS.values() if answer is not None]
    places, schemas = msgspec.json.schema_components(kinds, ref_template=PLACE)
    place = dict(zip(kinds, places, strict=True))
    _make_precise(schemas, service)
    items = {"anyOf": [place[kind] for kind in response_bodies.ITEMS.values()]}
    schemas["ResponsesBody"]["properties"]["input"]["anyOf"][-1]["items"] = items

    def answers_of(path: str, ok: dict[str, Any], posts: bool) -> dict[str, Any]:
        statuses = {401} if with_keys and path not in WITHOUT_KEY else set()
        statuses |= {400, 404, 413, 415, 500, 503} if posts else set()
        statuses |= {404} if "{" in path else set()
        statuses |= {429} if posts and with_keys else set()
        error = _content(place[MessagesError if path.startswith(MESSAGES) else ErrorAnswer])
        errors = {str(status): {"description": SAID[status], "content": error} for status in sorted(statuses)}
        if path in WITHOUT_KEY:
            errors["503"] = {"description": "It is not.", "content": _content(place[answers.Status])}
        return {"200": {"description": "As it should be.", "content": ok}} | errors

    def operation(path: str, summary: str, ok: dict[str, Any], **more: Any) -> dict[str, Any]:
        found = {"summary": summary, "responses": answers_of(path, ok, "requestBody" in more), **more}
        return found | ({"security": KEY} if with_keys and path not in WITHOUT_KEY else {})

    paths: dict[str, Any] = {}
    for path, (summary, body, answer) in POSTS.items():
        if path not in served:
            continue
        ok = _content(place[answer])
        if path in STREAMED:
            ok["text/event-stream"] = {"schema": EVENT}
        taken = {"required": True, "content": _content(place[body])}
        paths[path] = {"post": operation(path, summary, ok, requestBody=taken)}
    file = {"type": "object", "properties": {"file": {"type": "string", "format": "binary"}}, "required": ["file"]}
    for path, summary in HEARD.items():
        ok = _content(place[Transcription]) | {"text/plain": {"schema": {"type": "string"}}}
        ok["text/event-stream"] = {"schema": EVENT}
        taken = {"required": True, "content": {FORM: {"schema": {"allOf": [place[Form], file]}}}}
        paths[path] = {"post": operation(path, summary, ok, requestBody=taken)}
    for path, (summary, given) in GETS.items():
        if path not in served:  # it may have a port of its own
            continue
        text = {"text/plain": {"schema": {"type": "string"}}} if path == "/metrics" else _content({"type": "object"})
        ok = text if given is None else _content(place[given])
        name = "response_id" if "response_id" in path else "model"
        known = name == "model" and service.adapter_root is None  # else there may be more later
        values = {"enum": service.known} if known else {"type": "string", "minLength": 1}
        named = [{"name": name, "in": "path", "required": True, "schema": values}]
        paths[path] = {"get": operation(path, summary, ok, **({"parameters": named} if "{" in path else {}))}
    return {
        "openapi": "3.1.0",
        "info": {"title": "trt-spec", "version": version("trt-spec"), "description": "An OpenAI-compatible server."},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _make_precise(schemas: dict[str, Any], service: Service) -> None:
    """Write the limits of this very model into the schemas."""
    for name, schema in schemas.items():
        if name.endswith("Body") and "model" in schema["properties"]:
            known = service.adapter_root is None
            schema["properties"]["model"] = {
                **({"enum": [*service.known, None]} if known else {"type": ["string", "null"]}),
                "default": None,
            }
    tokens = schemas["DetokenizeBody"]["properties"]["tokens"]
    tokens["items"]["maximum"] = service.decoder.vocab_size - 1
