"""A completions API in this process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


class FakeServer:
    """Streams token ids 100, 101, ... and remembers the bodies.

    fails: the requests, by number, that are answered 500.
    drop_tokens: so many fewer than asked for.
    """

    def __init__(self, fails: range = range(0)) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.sessions: list[str | None] = []
        self.fails = fails
        self.drop_tokens = 0
        self.with_usage = True
        self.with_done = True
        self.app = Starlette(
            routes=[Route("/v1/completions", self.complete, methods=["POST"])]
        )

    def client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=self.app)
        return httpx.AsyncClient(transport=transport, base_url="http://x")

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.sessions.append(request.headers.get("x-session-id"))
        if len(self.bodies) - 1 in self.fails:
            return JSONResponse({"error": "pool on fire"}, status_code=500)
        return StreamingResponse(self.stream(body), media_type="text/event-stream")

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        for n in range(body["max_tokens"] - self.drop_tokens):
            logprobs = {"token_logprobs": [-0.5 - n]}
            # A line ends at "\n" alone, not at what else Unicode calls a line's end.
            text = "\x85\u2028"
            choice = {"text": text, "token_ids": [100 + n], "logprobs": logprobs}
            yield event(choices=[choice])
        usage: dict[str, Any] = {"prompt_tokens": len(body["prompt"])}
        if self.with_usage:
            usage["prompt_tokens_details"] = {"cached_tokens": 2}
        yield event(choices=[], usage=usage, metrics={"queue_time_ms": 250.0})
        if self.with_done:
            yield "data: [DONE]\n\n"


def event(**fields: Any) -> str:
    return f"data: {json.dumps(fields, ensure_ascii=False)}\n\n"
