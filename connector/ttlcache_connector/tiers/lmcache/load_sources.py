"""From which tier a load was served: only the server knows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lmcache.v1.multiprocess.protocols.server_module import ServerModuleCallRequest

from ttlcache_connector.lmcache_server import rpc
from ttlcache_connector.tiers.base import Reload

#: How long the answer to where a load came from is waited for. A load whose source
#: stays unknown is counted, and teaches nothing about what either tier costs.
SOURCE_TIMEOUT_S = 10.0


@dataclass(slots=True)
class _Question:
    """Where a finished load's bytes came from."""

    request_id: str
    tokens: int
    copy_s: float
    read_s: float
    asked_s: float
    answer: Any


class Sources:
    """Asks the server from which tier loads were served (`lmcache_module`).

    A server without that module says so once; CPU memory is assumed then.
    """

    def __init__(self, adapter: Any, now_s: Callable[[], float]) -> None:
        (self._client, *_) = adapter.req_clients.values()
        self._now_s = now_s
        self._tells = True
        self._open: list[_Question] = []
        self._known: list[Reload] = []

    @property
    def is_waiting(self) -> bool:
        return bool(self._open)

    def ask(
        self, request_id: str, tokens: int, copy_s: float, read_s: float = 0.0
    ) -> None:
        """A load is done.

        Args:
            copy_s: from CPU memory to the device.
            read_s: before that, from disk, if it was there.
        """
        if not self._tells:
            self._known.append(Reload("cpu", tokens, copy_s))
            return
        answer, now_s = self._call(request_id), self._now_s()
        self._open.append(_Question(request_id, tokens, copy_s, read_s, now_s, answer))

    def known(self) -> list[Reload]:
        questions, self._open = self._open, []
        for question in questions:
            tier = self._tier(question)
            late = self._now_s() - question.asked_s > SOURCE_TIMEOUT_S
            if tier is None and not late:
                self._open.append(question)
            else:
                seconds = question.copy_s
                if tier != "cpu":
                    seconds += question.read_s
                self._known.append(Reload(tier, question.tokens, seconds))
        known, self._known = self._known, []
        return known

    def _tier(self, question: _Question) -> str | None:
        """None where it is not known yet."""
        if not question.answer.query():
            return None
        answer = question.answer.result(timeout=0)
        if not answer.success:
            self._tells = False
            return "cpu"
        found = json.loads(answer.payload)
        if not found:
            # The server's own event is on its way to the module.
            question.answer = self._call(question.request_id)
            return None
        return "disk" if found.get("disk") else "cpu"

    def _call(self, request_id: str) -> Any:
        payload = json.dumps(request_id).encode()
        return self._client.server_module_call(
            ServerModuleCallRequest(method=rpc.LOOKUP_TIERS, payload=payload)
        )
