"""ASGI messages: requests read up to a bound and given on as they came; answers."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from email.utils import formatdate
from typing import Any

from ttlcache.clock import wall_s

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]

#: Where programs make their turns.
GENERATING = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
)
#: Longer bodies pass unread; the engine then goes by headers and by the prompt.
MAX_BODY_BYTES = 8 * 1024 * 1024


async def read_body(
    receive: Receive, max_bytes: int = MAX_BODY_BYTES
) -> tuple[list[Message], bytes | None]:
    """What has come, and the whole body; None if it is too long or was cut off."""
    messages: list[Message] = []
    size = 0
    while True:
        message = await receive()
        messages.append(message)
        if message["type"] != "http.request":
            return messages, None
        size += len(message.get("body", b""))
        if size > max_bytes:
            return messages, None
        if not message.get("more_body", False):
            return messages, b"".join(m.get("body", b"") for m in messages)


def replay(messages: list[Message], receive: Receive) -> Receive:
    """`messages` first, then whatever the server still has to say."""
    pending = iter(messages)

    async def replayed() -> Message:
        for message in pending:
            return message
        return await receive()

    return replayed


def with_length(headers: Headers, length: int) -> list[tuple[bytes, bytes]]:
    """The headers of a body that has another length now."""
    kept = [h for h in headers if h[0].lower() != b"content-length"]
    return [*kept, (b"content-length", str(length).encode())]


async def send_json(
    send: Send, status: int, content: object, headers: Headers = ()
) -> None:
    """A whole answer; `headers` beside those of its body."""
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), *headers]
    headers = with_length(headers, len(body))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def answer(
    send: Send, status: int, content: object, *, last: bool = False
) -> None:
    """JSON with a date. `last`: the connection ends, for its request was not read."""
    date = (b"date", formatdate(wall_s(), usegmt=True).encode())
    close = [(b"connection", b"close")] if last else []
    await send_json(send, status, content, [date, *close])


async def refuse(
    send: Send, status: int, kind: str, text: str, *, last: bool = False
) -> None:
    """An error in the form that OpenAI's clients read."""
    error = {"message": text, "type": kind, "code": status}
    await answer(send, status, {"error": error}, last=last)
