"""A request's body on its way up, and word of a client that leaves."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio

from ttlcache_connector.http_asgi import Message, Receive, replay


class ClientGoneError(Exception):
    """The client left while its body was being sent."""


class Upload:
    """The body that the upstream gets.

    Args:
        messages: what was read of the body.
        receive: where the rest of it comes from, and then word of the client.
        body: the whole body, None where it is longer than what is read at once.
    """

    def __init__(
        self, messages: list[Message], receive: Receive, body: bytes | None
    ) -> None:
        self._receive = receive if body is not None else replay(messages, receive)
        self._sent = anyio.Event()
        self.content: bytes | AsyncIterator[bytes]
        if body is not None:
            self.content = body
            self._sent.set()
        else:
            self.content = self._chunks()

    async def cancel_when_gone(self, scope: anyio.CancelScope) -> None:
        """Ends the exchange as soon as the client has left."""
        await self._sent.wait()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                scope.cancel()
                return

    async def _chunks(self) -> AsyncIterator[bytes]:
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                raise ClientGoneError
            yield message.get("body", b"")
            if not message.get("more_body", False):
                self._sent.set()
                return
