"""Bodies on their way up: what is read, what is held, what is sent, and for how long.

The application in this process; no socket, no server.
"""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import httpx
import pytest

from tests.front.conftest import CHAT, HANG_S, front_before
from ttlcache_connector.front.app import Front
from ttlcache_connector.front.upload import Room, Upload
from ttlcache_connector.http.asgi import MAX_BODY_BYTES

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(HANG_S)]

MIB = 2**20
Handler = Callable[[httpx.Request], Awaitable[httpx.Response]]
CHUNKED = (b"transfer-encoding", b"chunked")
#: What is looked into, and what is not.
PATHS = pytest.mark.parametrize("path", [CHAT, "/v1/embeddings"])


class Transport(httpx.AsyncBaseTransport):
    """An upstream that reads a body as it likes."""

    def __init__(self, handle: Handler) -> None:
        self.handle_async_request = handle


class Client:
    """One request: `say` pieces of its body, and see what comes back."""

    def __init__(self, *headers: tuple[bytes, bytes], path: str = CHAT) -> None:
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": list(headers),
        }
        self._said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.heard: list[dict[str, Any]] = []

    def say(self, body: bytes, *, more: bool = True) -> None:
        message = {"type": "http.request", "body": body, "more_body": more}
        self._said.put_nowait(message)

    def leave(self) -> None:
        self._said.put_nowait({"type": "http.disconnect"})

    async def receive(self) -> dict[str, Any]:
        return await self._said.get()

    async def send(self, message: dict[str, Any]) -> None:
        self.heard.append(message)

    async def ask(self, front: Front) -> None:
        await front(self.scope, self.receive, self.send)

    @property
    def status(self) -> int:
        return self.heard[0]["status"]


async def served(client: Client, handle: Handler, **limits: float) -> dict[str, Any]:
    """The front's status after a client's request, of which nothing may be left."""
    front = front_before(Transport(handle), **limits)
    await client.ask(front)
    status = front.status()
    assert (status["held_bytes"], status["under_way"]) == (0, 0)
    return status


def length(number: int) -> tuple[bytes, bytes]:
    return b"content-length", str(number).encode()


def answer(*pieces: bytes) -> httpx.Response:
    async def stream() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    return httpx.Response(200, content=stream())


async def echo(request: httpx.Request) -> httpx.Response:
    return answer(*[piece async for piece in request.stream])


@pytest.mark.parametrize(
    ("path", "header"),
    [
        ("/v1/embeddings", CHUNKED),
        ("/v1/files", length(8)),
        (CHAT, length(MAX_BODY_BYTES + 1)),
    ],
)
async def test_what_is_not_looked_into_goes_on_at_once(path, header):
    """The upstream has the first piece before the client has sent the second."""
    client = Client(header, path=path)
    second = b"second".ljust(MAX_BODY_BYTES)
    seen = []

    async def handle(request: httpx.Request) -> httpx.Response:
        async for piece in request.stream:
            seen.append(piece)
            client.say(second, more=False)
        return answer()

    client.say(b"first")
    await served(client, handle)
    assert seen == [b"first", second]


async def test_a_request_without_a_body_waits_for_none():
    async def handle(request: httpx.Request) -> httpx.Response:
        assert "transfer-encoding" not in request.headers
        return answer(b"ok")

    client = Client()
    await served(client, handle)
    assert client.status == 200


async def test_a_body_is_not_kept_while_its_answer_takes():
    """An answer takes minutes, and there are hundreds of them at once."""
    size = 6 * MIB
    client = Client(length(size))
    taken: list[int] = []

    async def handle(request: httpx.Request) -> httpx.Response:
        taken.append(sum([len(piece) async for piece in request.stream]))

        async def stream() -> AsyncIterator[bytes]:
            taken.append(tracemalloc.get_traced_memory()[0])
            yield b"ok"

        return httpx.Response(200, content=stream())

    tracemalloc.start()
    try:
        for sent in range(65_536, size + 1, 65_536):
            client.say(b" " * 65_536, more=sent < size)
        await served(client, handle)
    finally:
        tracemalloc.stop()
    assert taken[0] == size
    assert taken[1] < MIB


@PATHS
@pytest.mark.parametrize("beginning", [b"", b'{"model": '])
async def test_a_body_that_does_not_come_is_408(path, beginning):
    client = Client(length(100), path=path)
    if beginning:
        client.say(beginning)
    status = await served(client, echo, timeout_s=0.05)
    assert client.status == 408
    assert (b"connection", b"close") in client.heard[0]["headers"]
    assert (status["bodies_late"], status["upstream_errors"]) == (1, 0)


@PATHS
@pytest.mark.parametrize("beginning", [b"", b"half"])
async def test_a_body_that_ends_early_is_400(path, beginning):
    """uvicorn ends it at once where a client asks for HTTP/2, as Java's does."""
    client = Client(length(100), path=path)
    client.say(beginning, more=False)
    status = await served(client, echo)
    assert client.status == 400
    assert b"HTTP/2" in client.heard[1]["body"]
    assert status["upstream_errors"] == 0


@PATHS
async def test_a_length_beside_chunks_is_not_believed(path):
    client = Client(length(100), CHUNKED, path=path)
    seen: list[tuple[bytes, str]] = []

    async def handle(request: httpx.Request) -> httpx.Response:
        told = request.headers.get("content-length", "")
        seen.append((b"".join([piece async for piece in request.stream]), told))
        return answer()

    client.say(b"{}", more=False)
    await served(client, handle)
    assert seen == [(b"{}", "2" if path == CHAT else "")]


async def test_a_client_that_leaves_an_early_answer_is_noticed():
    """An upstream may answer before it has the whole body, and take no more of it."""
    client = Client(length(100), path="/v1/embeddings")
    ended = []

    async def handle(request: httpx.Request) -> httpx.Response:
        async for _ in request.stream:
            break

        async def stream() -> AsyncIterator[bytes]:
            try:
                yield b"an answer"
                client.leave()
                await anyio.sleep_forever()
            finally:
                ended.append(True)

        return httpx.Response(413, content=stream())

    client.say(b"a part")
    await served(client, handle)
    assert client.status == 413
    assert ended == [True]


async def test_a_body_is_sent_once():
    """A second attempt fails, whoever makes it: it would send the rest as the whole."""
    client = Client(length(11), path="/v1/embeddings")
    sent: list[list[bytes]] = []

    async def handle(request: httpx.Request) -> httpx.Response:
        for _ in range(2):
            sent.append([])
            async for piece in request.stream:
                sent[-1].append(piece)
                break
        return answer()

    client.say(b"first")
    client.say(b"second", more=False)
    await served(client, handle)
    assert sent == [[b"first"], []]
    assert client.status == 502

    again = Client(length(11))
    again.say(b"first")
    upload = Upload(again.scope, again.receive, Room())
    await anext(upload.content())
    with pytest.raises(httpx.StreamConsumed):
        await anext(upload.content())
