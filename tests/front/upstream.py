"""A light server in a vLLM's place: who got which request, with which headers.

For tests of routing and of the proxy alone; no engine and no model.
    python -m tests.front.upstream NAME PORT
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

NAME = sys.argv[1] if len(sys.argv) > 2 else "upstream"
#: What tests ask it about.
STATE = {"left": 0, "held": 0, "streamed": 0}
#: Headers that a proxy could take for its own.
OWN_HEADERS = [("server", "light"), ("date", "Thu, 01 Jan 1970 00:00:00 GMT")]


async def health(request: Request) -> PlainTextResponse:
    return PlainTextResponse("ok")


async def state(request: Request) -> JSONResponse:
    return JSONResponse(STATE)


async def stream(events: int) -> Any:
    try:
        for number in range(events):
            yield f'data: {{"number": {number}}}\n\n'.encode()
            await asyncio.sleep(0.01)
        yield b"data: [DONE]\n\n"
    except asyncio.CancelledError:
        STATE["left"] += 1
        raise


async def flood(mebibytes: int) -> Any:
    for _ in range(mebibytes):
        yield b"x" * 2**20
        STATE["streamed"] += 1


async def anything(request: Request) -> Any:
    body = await request.body()
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        asked = {}
    if not isinstance(asked, dict):
        asked = {}
    if asked.get("hold"):
        STATE["held"] += 1
        while not await request.is_disconnected():
            await asyncio.sleep(0.01)
        STATE["left"] += 1
        return PlainTextResponse("nobody listens")
    if asked.get("flood"):
        return StreamingResponse(flood(asked["flood"]))
    if asked.get("breaks"):
        return PlainTextResponse("not all of it", headers={"content-length": "100"})
    if asked.get("events"):
        events = stream(asked["events"])
        return StreamingResponse(events, media_type="text/event-stream")
    answer = {
        "name": NAME,
        "path": request.url.path,
        "raw_path": request.scope["raw_path"].decode(),
        "query": request.url.query,
        "headers": dict(request.headers),
        "size": len(body),
        "body": body[:65536].decode(errors="replace"),
    }
    return JSONResponse(answer, status_code=asked.get("status", 200))


app = Starlette(
    routes=[
        Route("/health", health),
        Route("/state", state),
        Route("/{path:path}", anything, methods=["GET", "POST", "DELETE", "PUT"]),
    ]
)

if __name__ == "__main__":
    uvicorn.run(
        app,
        port=int(sys.argv[2]),
        log_level="error",
        headers=OWN_HEADERS,
        date_header=False,
    )
