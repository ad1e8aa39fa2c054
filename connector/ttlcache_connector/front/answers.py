"""Answers of the front's own."""

from __future__ import annotations

import json
from email.utils import formatdate

from ttlcache.clock import wall_s
from ttlcache_connector.http.asgi import Send, with_length

_CLOSE = (b"connection", b"close")


async def answer(
    send: Send, status: int, content: object, *, last: bool = False
) -> None:
    """JSON. `last`: the connection ends with it, for its request was not read."""
    body = json.dumps(content).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"date", formatdate(wall_s(), usegmt=True).encode()),
        *([_CLOSE] if last else []),
    ]
    headers = with_length(headers, len(body))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def refuse(
    send: Send, status: int, kind: str, text: str, *, last: bool = False
) -> None:
    """An error in the form that OpenAI's clients read."""
    error = {"message": text, "type": kind, "code": status}
    await answer(send, status, {"error": error}, last=last)
