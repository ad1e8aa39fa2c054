"""A client's connection, closed where no whole request comes on it."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.auto import AutoHTTPProtocol


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's, which lets a client wait for ever before its first request is there,
    and in the middle of a later one's head. Such clients count as connections at once.
    """

    timeout_keep_alive_task: asyncio.TimerHandle | None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._close_at(self.loop.time() + self.timeout_keep_alive)

    def data_received(self, data: bytes) -> None:
        timer = self.timeout_keep_alive_task
        super().data_received(data)
        if timer is not None and (self.cycle is None or self.cycle.response_complete):
            self._close_at(timer.when())  # it is not a whole head yet

    def _close_at(self, due_s: float) -> None:
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        self.timeout_keep_alive_task = self.loop.call_at(
            due_s, self.timeout_keep_alive_handler
        )
