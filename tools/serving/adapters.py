"""Loads and unloads adapters while the server runs, on the paths that vLLM has for it, from one folder alone."""

from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from .answers import Status
from .bodies import LoadAdapterBody, UnloadAdapterBody
from .delivery import json_response
from .errors import ApiError
from .raw_bodies import body_of
from .service import Service


async def load_adapter(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await body_of(request, LoadAdapterBody)
    service.require_new(body.lora_name)
    folder = _inside(service, body.lora_path)
    await run_in_threadpool(service.decoder.load_adapter, body.lora_name, folder)
    return json_response(Status(f"adapter {body.lora_name} is loaded"))


async def unload_adapter(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await body_of(request, UnloadAdapterBody)
    if body.lora_name not in service.decoder.adapters:
        raise ApiError(404, f"there is no adapter {body.lora_name!r}", "lora_name", "model_not_found")
    if body.lora_name in service.lasting:
        raise ApiError(
            400,
            f"adapter {body.lora_name!r} is the server's own (--adapter); clients unload what they load",
            "lora_name",
        )
    await run_in_threadpool(service.decoder.unload_adapter, body.lora_name)
    return json_response(Status(f"adapter {body.lora_name} is unloaded"))


def _inside(service: Service, path: str) -> Path:
    """Return a folder below the one that the server loads adapters from; nothing else may be named."""
    root = service.adapter_root
    assert root is not None
    try:
        folder = (root / path).resolve()
        inside = folder.is_relative_to(root.resolve()) and folder.is_dir()
    except (ValueError, OSError, RuntimeError):  # a NUL, a name that no file system takes, a link to itself
        inside = False
    if not inside:
        raise ApiError(400, f"{path[:200]!r} is no folder that this server may load adapters from", "lora_path")
    return folder
