"""A request's body on its way up: read first where it is needed, and not kept.

What is held of all bodies at once has a bound. Beyond it they go on unread: the
client's pace is the upstream's then.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import anyio
import httpx

from ttlcache_connector.http.asgi import MAX_BODY_BYTES, Receive, Scope


class ClientGoneError(Exception):
    """The client left while its body was being read or sent."""


class BodyError(Exception):
    """The client did not send the body that it announced: what it is told."""

    status = 400
    kind = "invalid_request_error"


class BodyTimeoutError(BodyError):
    """It did not come in time."""

    status = 408
    kind = "timeout_error"


@dataclass(slots=True)
class Room:
    """Counts the bytes of bodies that are in memory, over all requests.

    max_bytes: of all bodies at once that are read before they go on.
    timeout_s: for a body that is read first to be there; for a piece of one that
        streams to come.
    unread: bodies that were passed on unread for want of room.
    late: bodies that did not come in time.
    """

    max_bytes: int = 256 * 2**20
    timeout_s: float = 60.0
    held_bytes: int = 0
    unread: int = 0
    late: int = 0

    @property
    def full(self) -> bool:
        return self.held_bytes > self.max_bytes

    @contextlib.contextmanager
    def patience(self) -> Iterator[None]:
        """For as long as a client's body may take."""
        try:
            with anyio.fail_after(self.timeout_s):
                yield
        except TimeoutError:
            self.late += 1
            raise BodyTimeoutError("the body did not come") from None


class Upload:
    """The body that the upstream gets.

    Args:
        scope: the request, whose headers tell whether there is a body.
        receive: where it comes from, and then word of the client.
        room: shared by all requests.
    """

    def __init__(self, scope: Scope, receive: Receive, room: Room) -> None:
        self._receive = receive
        self._room = room
        #: What came and was not sent; with what is being sent it is `_held_bytes`.
        self._buffer: bytes | bytearray = bytearray()
        self._held_bytes = 0
        self._begun = False
        headers = {name.lower(): value for name, value in scope["headers"]}
        length = headers.get(b"content-length", b"")
        chunked = b"transfer-encoding" in headers
        self._announced_bytes = 0 if chunked or not length.isdigit() else int(length)
        self._come_bytes = 0
        #: More is to come (RFC 9112 §6.3: without either header there is no body).
        self._more = self._announced_bytes > 0 or chunked
        #: From here on `receive` only tells whether the client is still there.
        self._over = anyio.Event()
        if not self._more:
            self._over.set()

    async def whole(self) -> bytes | None:
        """The whole body; None if it is too long or room is short: then it streams.

        Raises:
            BodyError: it did not come in time, or not all of it.
            ClientGoneError: it never will.
        """
        if self._announced_bytes > MAX_BODY_BYTES:
            return None
        with self._room.patience():
            while self._more:
                await self._read()
                if self._held_bytes > MAX_BODY_BYTES:
                    return None
                if self._more and self._room.full:
                    self._room.unread += 1
                    return None
        self._buffer = bytes(self._buffer)
        return self._buffer

    def replace(self, body: bytes) -> None:
        """Send this instead of what was read whole."""
        self._buffer = body
        self._hold(len(body))

    def content(self) -> bytes | AsyncIterator[bytes]:
        """For httpx, whose requests keep bytes until the answer ends: a generator."""
        empty = not (self._more or self._buffer or self._begun)
        return b"" if empty else self._chunks()

    def end(self) -> None:
        """The upstream takes no more of it. It may answer before it has it all."""
        self._buffer = b""
        self._hold(0)
        self._over.set()

    async def cancel_when_gone(self, scope: anyio.CancelScope) -> None:
        """Ends the exchange as soon as the client has left."""
        await self._over.wait()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                scope.cancel()
                return

    async def _chunks(self) -> AsyncIterator[bytes]:
        if self._begun:  # what is gone cannot be sent again, nor half of it
            raise httpx.StreamConsumed
        self._begun = True
        while True:
            if self._buffer:
                yield self._take()
                self._hold(0)
            if not self._more:
                return
            with self._room.patience():
                await self._read()

    def _take(self) -> bytes:
        taken, self._buffer = bytes(self._buffer), bytearray()
        return taken

    async def _read(self) -> None:
        message = await self._receive()
        if message["type"] != "http.request":
            raise ClientGoneError
        piece = message.get("body", b"")
        self._buffer += piece
        self._come_bytes += len(piece)
        self._hold(len(self._buffer))
        self._more = message.get("more_body", False)
        if self._more:
            return
        self._over.set()
        if self._come_bytes < self._announced_bytes:
            # A server that is asked for HTTP/2 may take the body for ended.
            raise BodyError("the body ended early; HTTP/2 is not spoken here")

    def _hold(self, num_bytes: int) -> None:
        self._room.held_bytes += num_bytes - self._held_bytes
        self._held_bytes = num_bytes
