"""The application: every path, and what comes before them."""

from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...engines import RequestError, TrtSpecError
from .access_log import AccessLog, note
from .adapters import load_adapter, unload_adapter
from .allowances import Allowances
from .answers import ModelList, Prompt, Status, Tokens, Version
from .chat import apply_template, chat, count_chat, prompt_of
from .completions import complete
from .delivery import client_error, error_response, json_response
from .errors import ApiError
from .guard import BodyLimit, Entrance, Failures
from .keys import Keys
from .messages import answer_messages, count_tokens
from .metrics import CONTENT_TYPE
from .openapi import openapi_page
from .prompt_bodies import DetokenizeBody, TokenizeBody
from .raw_bodies import body_of
from .responses import count_input, kept_response, respond
from .service import Service
from .transcriptions import transcribe, translate

UNSERVED = {  # paths of other servers, and why they are none here
    "/v1/load_lora_adapter": "this server takes no adapters from clients; start it with --adapters-from",
    "/v1/unload_lora_adapter": "this server takes no adapters from clients; start it with --adapters-from",
    "/v1/embeddings": "the model writes text and gives no embeddings; ask a server of an embedding model",
    "/v1/rerank": "the model writes text and ranks none; ask a server of a reranking model",
    "/v1/moderations": "nothing is moderated here; ask a service that does",
    "/v1/images/generations": "the model writes text and paints nothing; ask a server of an image model",
    "/v1/audio/speech": "the model writes text and does not speak; ask a server of a speech model",
}


def make_app(
    service: Service,
    keys: Keys,
    log_prompts: bool = False,
    origins: Sequence[str] = (),
    allowances: Allowances | None = None,
    metrics_apart: bool = False,
) -> Starlette:
    """Make the application; whoever runs it starts the service's stepper in the event loop and closes it.

    Pages of these `origins` may ask from a browser.
    """
    cross = Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id"],
    )
    allowances = service.stepper.allowances = allowances or Allowances()
    allowances.on_refusal = service.metrics.count_refusal
    routes = [
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/chat/completions/input_tokens", count_chat, methods=["POST"]),
        Route("/v1/responses", respond, methods=["POST"]),
        Route("/v1/responses/input_tokens", count_input, methods=["POST"]),
        Route("/v1/responses/{response_id}", kept_response),
        Route("/v1/messages", answer_messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
        Route("/v1/audio/transcriptions", transcribe, methods=["POST"]),
        Route("/v1/audio/translations", translate, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{model:path}", model),
        *(
            []
            if service.adapter_root is None
            else [
                Route("/v1/load_lora_adapter", load_adapter, methods=["POST"]),
                Route("/v1/unload_lora_adapter", unload_adapter, methods=["POST"]),
            ]
        ),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/apply-template", apply_template, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/health", health),
        Route("/ready", ready),
        Route("/version", the_version),
        *([] if metrics_apart else [Route("/metrics", metrics)]),
        Route("/openapi.json", openapi),
    ]

    def named(path: str) -> str:
        """Return the path of its route, since anybody can make one up."""
        return next((named_path(route) for route in routes if route.path_regex.match(path)), "other")

    def count(method: str, path: str, status: int) -> None:
        service.metrics.count_answer(method if method in ("GET", "POST") else "other", named(path), status)

    app = Starlette(
        routes=routes,
        middleware=[
            *([] if service.traces is None else [Middleware(service.traces.around, named=named)]),
            Middleware(AccessLog, prompts=log_prompts, count=count),
            *([cross] if origins else []),
            Middleware(Entrance, keys=keys, allowances=allowances),
            Middleware(BodyLimit, sees=service.decoder.images is not None),
            Middleware(Failures),
        ],
        exception_handlers={HTTPException: refused, ApiError: failed, TrtSpecError: failed},
    )
    app.state.service, app.state.origins = service, origins
    page = openapi_page(service, bool(keys), set(map(named_path, routes)))
    app.state.openapi = json_response(page)  # once: it takes as long as twenty answers
    return app


def named_path(route: Route) -> str:
    """Return a route's path with the names of what varies."""
    return route.path.replace(":path", "")


def make_metrics_app(service: Service) -> Starlette:
    """Make what answers on a port of its own, without a key."""
    app = Starlette(routes=[Route("/metrics", metrics), Route("/health", health), Route("/ready", ready)])
    app.state.service = service
    return app


async def models(request: Request) -> Response:
    return json_response(ModelList(_service(request).cards))


async def model(request: Request) -> Response:
    service = _service(request)
    service.require_model(request.path_params["model"])
    return json_response(next(card for card in service.cards if card.id == request.path_params["model"]))


async def tokenize(request: Request) -> Response:
    service = _service(request)
    body = await body_of(request, TokenizeBody)
    service.require_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "prompt and messages exclude each other, and one is needed", "prompt")
    if body.messages is not None:
        prompt, pictures = await prompt_of(service, body.messages, {}, service.most_counted)
        ids = service.images.expanded(prompt, pictures)
    else:
        ids = await service.encode(body.prompt or "", body.add_special_tokens, most=service.most_counted)
    answer = Tokens(len(ids), service.max_length, ids)
    if body.return_token_strs:
        answer.token_strs = await service.aside(lambda: list(map(service.spelling.to_text, ids)), len(ids))
    return json_response(answer)


async def detokenize(request: Request) -> Response:
    service = _service(request)
    body = await body_of(request, DetokenizeBody)
    service.require_model(body.model)
    if len(body.tokens) > service.most_counted:
        raise RequestError(
            f"there are {len(body.tokens):,} tokens, expected at most {service.most_counted:,}; send less", "tokens"
        )
    for token in body.tokens:
        if token >= service.decoder.vocab_size:
            raise RequestError(
                f"token id {token} is outside the vocabulary of {service.decoder.vocab_size} tokens", "tokens"
            )
    decode = partial(service.decoder.tokenizer.decode, body.tokens, skip_special_tokens=False)
    text = await service.aside(decode, len(body.tokens))
    return json_response(Prompt(text))


async def the_version(request: Request) -> Response:
    return json_response(Version(version("trt-spec")))


async def health(request: Request) -> Response:
    state = _service(request).stepper.state
    return json_response(Status(state), 200 if state == "alive" else 503)


async def ready(request: Request) -> Response:
    stepper = _service(request).stepper
    state = "draining" if stepper.draining else "ready" if stepper.state == "alive" else stepper.state
    return json_response(Status(state), 200 if state == "ready" else 503)


async def metrics(request: Request) -> Response:
    return Response(_service(request).metrics.page(), media_type=CONTENT_TYPE)


async def openapi(request: Request) -> Response:
    page: Response = request.app.state.openapi
    return page


async def refused(request: Request, error: Exception) -> Response:
    """No such path, or no such method there."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    reason = UNSERVED.get(path)
    said = {404: f"{path} is not a path of this server; /openapi.json lists them all"}
    if reason is not None:
        said[404] = f"{path} is not served: {reason}"
    said[405] = f"{request.method} is not a method of {path}; /openapi.json lists them all"
    message = said.get(error.status_code, str(error.detail))
    return error_response(ApiError(error.status_code, message, headers=error.headers), request.scope)


async def failed(request: Request, error: Exception) -> Response:
    problem = client_error(error)
    note(request.scope, error=problem)
    return error_response(problem, request.scope)


def _service(request: Request) -> Service:
    service: Any = request.app.state.service
    assert isinstance(service, Service)
    return service
