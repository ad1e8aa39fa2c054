"""Tells the server's retention module what was decided above it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from ttlcache_connector.log import logger
from ttlcache_connector.tiers.base import TurnEnd
from ttlcache_lmcache.client import HintClient
from ttlcache_lmcache.hints import Hint

log = logger(__name__)


class HintSender:
    """Hints to every server, over the clients that LMCache's connector has open.

    Sending is handing over to their own thread: it never waits. A server without the
    module says so once, and is not told any more until it was down.
    """

    def __init__(self, adapter: Any, now_s: Callable[[], float]) -> None:
        self._adapter = adapter
        self._now_s = now_s
        self._clients: list[HintClient] = []
        self._logged = False
        self.dropped = 0
        self.begin_anew()

    def begin_anew(self) -> None:
        """The servers may be others than before."""
        clients = self._adapter.req_clients.values()
        self._clients = [HintClient(client, self._now_s) for client in clients]

    def tell(self, turn: TurnEnd) -> None:
        if not self._clients:
            return
        try:
            told = [_hint(turn)]
        except ValidationError:
            # A client chose an id that is too long, say. That is no fault of the tier:
            # many faults would turn it off for everybody.
            self.dropped += 1
            return
        for client in list(self._clients):
            client.send(told)
            if client.refusal is not None:
                self._clients.remove(client)
                self._log(client.refusal)

    def _log(self, reason: str) -> None:
        if not self._logged:
            self._logged = True
            log.info(
                "ttlcache: the LMCache server takes no hints (%s): it keeps KV by its "
                "own rules; ttlcache serve-tiers --retention loads the module",
                reason,
            )


def _hint(turn: TurnEnd) -> Hint:
    return Hint(
        request_id=turn.request_id,
        program=turn.program,
        ttl_s=turn.ttl_s,
        is_last_step=turn.ttl_s is None,
        is_final=turn.is_final,
        is_over=True,
        tool=turn.tool or None,
    )
