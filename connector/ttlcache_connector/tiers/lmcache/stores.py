"""What LMCache stores of finished requests, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ttlcache_connector.tiers.base import TierStores, TurnEnd
from ttlcache_connector.tiers.lmcache.client import HintSender
from ttlcache_connector.tiers.lmcache.lookups import Lookups
from ttlcache_connector.tiers.lmcache.salts import SaltGenerations
from ttlcache_connector.tiers.lmcache.store_queue import StoreQueue
from ttlcache_lmcache.internals import DeferredStores

if TYPE_CHECKING:
    from vllm.v1.request import Request


class LMCacheStores(TierStores):
    """LMCache's deferred stores, with our queue in the place of its policies."""

    def __init__(
        self,
        inner: Any,
        queue: StoreQueue,
        deferred: DeferredStores,
        lookups: Lookups,
        salts: SaltGenerations,
        hints: HintSender,
        is_up: Callable[[], bool],
    ) -> None:
        """
        Args:
            inner: LMCache's connector, scheduler role.
            is_up: whether its server answers.
        """
        self._inner, self._queue, self._deferred = inner, queue, deferred
        self._lookups, self._salts = lookups, salts
        self._hints, self._is_up = hints, is_up

    def finished(self, request: Request, block_ids: tuple[list[int], ...]) -> None:
        self._lookups.end(request.request_id)
        # It may leave without blocks.
        self._salts.orphan_lookup(request.request_id)
        # LMCache reads the tracker where a client asks for its statistics.
        self._salts.tracker_of(request)
        self._inner.request_finished_all_groups(request, block_ids)

    def has_unstored(self, request_id: str) -> bool:
        waits = self._queue.has_pending_request(request_id)
        return waits and self._deferred.is_finished(request_id) and self._is_up()

    def demote(self, request_id: str) -> bool:
        return self.has_unstored(request_id) and self._queue.make_due(request_id)

    def drop(self, request_id: str) -> None:
        self._queue.drop(request_id)

    def report_turn(self, turn: TurnEnd) -> None:
        self._hints.report_turn(turn)

    def references(self) -> dict[int, int]:
        return self._deferred.references()
