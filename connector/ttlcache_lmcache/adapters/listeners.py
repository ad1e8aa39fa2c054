"""LMCache's events, handed to the tier. Nothing here may raise or wait.

L1's listeners run while LMCache holds L1's lock, so the tier never calls L1 while it
holds its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L1ManagerListener
from lmcache.v1.mp_observability.event import Event, EventType
from lmcache.v1.multiprocess.token_hasher import TokenHasher

from ttlcache_lmcache.retention.l1_tier import Tier
from ttlcache_lmcache.retention.residency import chain_of

#: Called with the name of the hook and what it raised.
OnError = Callable[[str, BaseException], None]
#: The salt of a request's session, None while it has none.
SaltOf = Callable[[str], str | None]
#: Lookups remembered whose ends may have been dropped by a full bus.
_MAX_OPEN = 1024


class _Guarded:
    """Calls the tier; LMCache lives on whatever that raises."""

    def __init__(self, tier: Tier, on_error: OnError) -> None:
        self._tier = tier
        self._on_error = on_error

    def _guarded(
        self, hook: str, handler: Callable[[Any], None]
    ) -> Callable[[Any], None]:
        def call(told: Any) -> None:
            try:
                handler(told)
            except Exception as error:  # noqa: BLE001 - see the class
                self._on_error(hook, error)

        return call


class L1Events(_Guarded, L1ManagerListener):
    """What enters and leaves L1."""

    def on_l1_keys_reserved_read(self, keys: list[ObjectKey]) -> None:
        return  # a lookup: the event bus tells more about it

    def on_l1_keys_read_finished(self, keys: list[ObjectKey]) -> None:
        return

    def on_l1_keys_reserved_write(self, keys: list[ObjectKey]) -> None:
        self._guarded("l1", self._tier.reserved)(keys)

    def on_l1_keys_write_finished(self, keys: list[ObjectKey]) -> None:
        self._guarded("l1", self._tier.written)(keys)

    def on_l1_keys_finish_write_and_reserve_read(self, keys: list[ObjectKey]) -> None:
        self._guarded("l1", self._tier.written)(keys)

    def on_l1_keys_deleted_by_manager(self, keys: list[ObjectKey]) -> None:
        self._guarded("l1", self._tier.deleted)(keys)

    def on_l1_keys_accessed(self, keys: list[ObjectKey]) -> None:
        self._guarded("l1", self._tier.context)(keys)


class RequestEvents(_Guarded):
    """Lookups and ends of requests.

    Of requests that looked nothing up only their session knows what they stored.
    """

    def __init__(self, tier: Tier, salt_of: SaltOf, on_error: OnError) -> None:
        super().__init__(tier, on_error)
        self._salt_of = salt_of
        self._unsalted: dict[str, Event] = {}  # lookups whose salt nobody said yet

    def subscribe(self, bus: Any, session_listeners: list[Any]) -> None:
        handlers = {
            EventType.MP_LOOKUP: self._on_lookup,
            EventType.MP_LOOKUP_PREFETCH_END: self._on_lookup_end,
            EventType.MP_REQUEST_END: self._on_end,
        }
        for event_type, handler in handlers.items():
            bus.subscribe(event_type, self._guarded(event_type.value, handler))
        session_listeners.append(self._guarded("session", self._on_session_end))

    def _on_lookup(self, event: Event) -> None:
        salt = self._salt_of(event.session_id)
        if salt is not None:
            self._looked_up(event, salt)
            return
        # LMCache tells of a lookup just before it opens the session.
        if len(self._unsalted) > _MAX_OPEN:
            self._unsalted.clear()
        self._unsalted[event.session_id] = event

    def _on_lookup_end(self, event: Event) -> None:
        lookup = self._unsalted.pop(event.session_id, None)
        if lookup is not None:
            self._looked_up(lookup, event.metadata["cache_salt"])

    def _looked_up(self, event: Event, salt: str) -> None:
        data = event.metadata
        chain = chain_of(data["model_name"], salt, data["chunk_hashes"])
        self._tier.lookup(event.session_id, chain, data["seq_len"])

    def _on_end(self, event: Event) -> None:
        self._unsalted.pop(event.session_id, None)
        self._tier.ended(event.session_id)

    def _on_session_end(self, session: Any) -> None:
        key = session.lookup_ipc_key  # a store's, too, where nothing was looked up
        if key is not None and not session.prefetch_group_windows:
            hashes = [TokenHasher.hash_to_bytes(h) for h in session.get_hashes(0)]
            chain = chain_of(key.model_name, key.cache_salt, hashes)
            self._tier.stored(session.request_id, chain, len(session.token_ids))
