"""Answers of the front's own."""

from __future__ import annotations

from email.utils import formatdate

from ttlcache.clock import wall_s
from ttlcache_connector.http.asgi import Send, send_json


async def answer(
    send: Send, status: int, content: object, *, last: bool = False
) -> None:
    """JSON. `last`: the connection ends with it, for its request was not read."""
    date = (b"date", formatdate(wall_s(), usegmt=True).encode())
    close = [(b"connection", b"close")] if last else []
    await send_json(send, status, content, [date, *close])


async def refuse(
    send: Send, status: int, kind: str, text: str, *, last: bool = False
) -> None:
    """An error in the form that OpenAI's clients read."""
    error = {"message": text, "type": kind, "code": status}
    await answer(send, status, {"error": error}, last=last)
