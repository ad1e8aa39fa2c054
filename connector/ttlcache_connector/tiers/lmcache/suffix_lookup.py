"""Lookups that begin where GPU memory ends, for tails that went down alone.

A pin that gives up its tail keeps the beginning in GPU memory; only the tail is copied
then. LMCache's own lookups begin at the first chunk, and would not find it;
ttlcache's module in LMCache's server lets them begin anywhere (`lmcache_starts`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lmcache.v1.multiprocess.protocols.server_module import ServerModuleCallRequest

from ttlcache_connector.lmcache_server import rpc
from ttlcache_connector.tiers.lmcache.suffix_index import LoneTails

if TYPE_CHECKING:
    from vllm.v1.request import Request


class LookupStarts:
    """Where each request's lookup begins, in tokens; most at 0."""

    def __init__(self, adapter: Any) -> None:
        """
        Args:
            adapter: LMCache's, of the scheduler; one of its methods is wrapped.
        """
        #: What is below without what stands before it; None: nothing ever is.
        self.tails: LoneTails | None = None
        self._clients = list(adapter.req_clients.values())
        self._chunk_tokens = adapter.lmcache_tokens_per_chunk
        self._answers: list[Any] | None = None
        self._heeded = False
        self._hear: Callable[[float], object] = lambda cpu_bytes: None
        self._asking = 0
        self._starts: dict[str, int] = {}
        self._make_key = adapter._create_key  # noqa: SLF001 - no other way in
        adapter._create_key = self._create_key  # noqa: SLF001

    def ask_servers(self, hear: Callable[[float], object]) -> None:
        """Whether lookups may begin anywhere; until the answer is here, they do not.

        Args:
            hear: told how many bytes of CPU memory the servers have.
        """
        order = ServerModuleCallRequest(method=rpc.LOOKUPS_BEGIN_ANYWHERE, payload=b"")
        self._heeded, self._hear = False, hear
        self._answers = [client.server_module_call(order) for client in self._clients]

    @property
    def are_heeded(self) -> bool:
        """Whether every server begins a lookup where it is told to."""
        if self._answers is not None and all(a.query() for a in self._answers):
            answers, self._answers = self._answers, None
            told = [_cpu_bytes(answer) for answer in answers]
            self._heeded = None not in told
            # The ranks' shares are alike: the smallest server is full first.
            self._hear(min(size or 0 for size in told) * len(told))
        return self._heeded and self.tails is not None

    def set_early(self, request: Request) -> None:
        """Its lookup is about to begin before it is known what GPU memory holds."""
        self._set(request, self._last_tail(request, request.num_tokens))

    def set(self, request: Request, hit_tokens: int) -> None:
        """The request's lookup is about to begin.

        Args:
            hit_tokens: what GPU memory holds of the request now.
        """
        has_tail = self._last_tail(request, hit_tokens) > 0
        chunks = hit_tokens // self._chunk_tokens if has_tail else 0
        self._set(request, chunks * self._chunk_tokens)

    def of(self, request_id: str) -> int:
        """Where the request's lookup begins: it knows nothing of what lies before."""
        return self._starts.get(request_id, 0)

    @contextmanager
    def beginning_at(self, start: int) -> Iterator[None]:
        """A lookup that LMCache's adapter begins inside begins there."""
        self._asking = start if self.are_heeded else 0
        try:
            yield
        finally:
            self._asking = 0

    def forget(self, request_id: str) -> None:
        """There is no lookup of the request any more."""
        self._starts.pop(request_id, None)

    def reset(self) -> None:
        """What is below is worthless."""
        if self.tails is not None:
            self.tails.clear()

    def _last_tail(self, request: Request, tokens: int) -> int:
        if self.tails is None or not self.are_heeded:
            return 0
        return self.tails.last_within(request, tokens)

    def _set(self, request: Request, start: int) -> None:
        if start:
            self._starts[request.request_id] = start
        else:
            self.forget(request.request_id)

    def _create_key(
        self, token_ids: list[int], start: int, end: int, *args: Any, **kwargs: Any
    ) -> Any:
        start = max(start, min(self._asking, end))
        return self._make_key(token_ids, start, end, *args, **kwargs)


def _cpu_bytes(answer: Any) -> float | None:
    """The server's CPU memory, 0 if it does not say; None if it heeds no starts."""
    try:
        told = answer.result(timeout=0)
        if not told.success or not (abilities := json.loads(told.payload)):
            return None
        return float(abilities.get("cpu_bytes", 0))
    except Exception:  # noqa: BLE001 - a server that does not know the question
        return None
