"""Tell an LMCache server's module what the engine's side knows of a turn.

For TTLConnector, or for any other process beside the engine: it names a turn's program
and tool, and its client's TTL, and the server evicts by them. Never waits, never
raises: a server that is slow or gone costs the hint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lmcache.v1.multiprocess.protocols.server_module import ServerModuleCallRequest

from ttlcache.clock import default_clock
from ttlcache_lmcache import hints
from ttlcache_lmcache.hints import Hint

#: Calls without an answer yet; beyond it hints are dropped.
MAX_IN_FLIGHT = 64
#: Answers of a server that went away never come.
ANSWER_TIMEOUT_S = 10.0


class RequestClient(Protocol):
    """What we use of LMCache's client; its connector's adapter holds one per server."""

    def server_module_call(self, request: Any) -> Any: ...


class HintClient:
    """Sends hints over LMCache's own transport.

    Args:
        client: as from `connect`, or one that LMCache's vLLM connector has open
            (`adapter.req_clients`).
        now_s: reads a clock that never goes back.

    Attributes:
        refusal: what the server said when it refused hints, None if it never did.
    """

    def __init__(
        self,
        client: RequestClient,
        now_s: Callable[[], float] | None = None,
    ) -> None:
        self._client = client
        self._now_s = now_s if now_s is not None else default_clock().now_s
        self._in_flight: deque[tuple[float, Any]] = deque()
        self.refusal: str | None = None

    def send(self, told: Sequence[Hint]) -> bool:
        """Send without waiting; False if they were dropped."""
        if not told:
            return True
        self.poll()
        if len(self._in_flight) >= MAX_IN_FLIGHT:
            return False
        try:
            call = ServerModuleCallRequest(
                method=hints.SET_TTL, payload=hints.encode(told)
            )
            answer = self._client.server_module_call(call)
        except Exception:  # noqa: BLE001 - a hint is not worth a step
            return False
        self._in_flight.append((self._now_s(), answer))
        return True

    def poll(self) -> None:
        """Take answers that came, refusals among them."""
        while self._in_flight:
            sent_s, future = self._in_flight[0]
            try:
                if future.query():
                    answer = future.result(timeout=0)
                    if not answer.success:
                        self.refusal = answer.error
                elif self._now_s() - sent_s < ANSWER_TIMEOUT_S:
                    return
            except Exception:  # noqa: BLE001 - the server went away
                pass
            self._in_flight.popleft()


def connect(url: str) -> Any:
    """A client of the server at `url`, e.g. `tcp://127.0.0.1:5555`."""
    import zmq
    from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

    return RequestClientFactory.create(url, context=zmq.Context.instance())
