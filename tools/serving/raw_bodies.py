"""Reads the bodies of requests, large ones so that others are not kept waiting."""

import asyncio
import gc
import time

from starlette.requests import Request

from .bodies import Body, read_body
from .errors import ApiError
from .service import Service

LARGE_BODY = 2**18  # bytes that may take a tenth of a second to read, if they are many small parts


async def body_of(request: Request, kind: type[Body]) -> Body:
    """Read a body. After a large one others have the loop for as long as it took, before the next one is read.

    Meanwhile no garbage is looked for: with many small parts that takes longer than reading them.
    """
    raw = await _raw_body(request)
    if len(raw) < LARGE_BODY:
        return read_body(raw, kind)
    service: Service = request.app.state.service
    await service.one_body.acquire()
    began = time.perf_counter()
    gc.disable()
    try:
        return read_body(raw, kind)
    finally:
        gc.enable()
        took = time.perf_counter() - began
        asyncio.get_running_loop().call_later(took, service.one_body.release)


async def _raw_body(request: Request) -> bytes:
    """Read a body that says it is JSON. A page on another site could send other types without asking."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"the body is of the type {kind or 'unknown'}, expected application/json; say so")
    return await request.body()
