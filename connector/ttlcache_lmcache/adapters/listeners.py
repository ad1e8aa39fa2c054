"""LMCache's events, handed to the tier. Nothing here may raise or wait.

L1's listeners run while LMCache holds L1's lock, so the tier never calls L1 while it
holds its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L1ManagerListener, L2AdapterListener
from lmcache.v1.mp_observability.event import Event, EventType
from lmcache.v1.multiprocess.token_hasher import TokenHasher

from ttlcache_lmcache.retention.l1_tier import Tier

#: Called with the name of the hook and what it raised.
OnError = Callable[[str, BaseException], None]
#: The salt of a request's session, None while it has none.
SaltOf = Callable[[str], str | None]
#: Beginnings remembered whose ends may have been dropped by a full bus.
_MAX_OPEN = 1024


class L1Events(L1ManagerListener):
    """What enters and leaves L1."""

    def __init__(self, tier: Tier, on_error: OnError) -> None:
        self._tier = tier
        self._on_error = on_error

    def _call(self, event: Callable[[Any], None], keys: list[ObjectKey]) -> None:
        try:
            event(keys)
        except Exception as error:  # noqa: BLE001 - LMCache's L1 must live on
            self._on_error("l1", error)

    def on_l1_keys_reserved_read(self, keys: list[ObjectKey]) -> None:
        return  # a lookup: the event bus tells more about it

    def on_l1_keys_read_finished(self, keys: list[ObjectKey]) -> None:
        return

    def on_l1_keys_reserved_write(self, keys: list[ObjectKey]) -> None:
        self._call(self._tier.reserved, keys)

    def on_l1_keys_write_finished(self, keys: list[ObjectKey]) -> None:
        self._call(self._tier.written, keys)

    def on_l1_keys_finish_write_and_reserve_read(self, keys: list[ObjectKey]) -> None:
        self._call(self._tier.written, keys)

    def on_l1_keys_deleted_by_manager(self, keys: list[ObjectKey]) -> None:
        self._call(self._tier.deleted, keys)

    def on_l1_keys_accessed(self, keys: list[ObjectKey]) -> None:
        self._call(self._tier.context, keys)


class L2Events(L2AdapterListener):
    """What L2 has: only that may leave L1 at expiry."""

    def __init__(self, tier: Tier, on_error: OnError) -> None:
        self._tier = tier
        self._on_error = on_error

    def _call(self, event: Callable[[Any], None], keys: list[ObjectKey]) -> None:
        try:
            event(keys)
        except Exception as error:  # noqa: BLE001 - LMCache's L2 must live on
            self._on_error("l2", error)

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self._call(self._tier.stored_below, keys)

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        self._call(self._tier.stored_below, keys)

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        self._call(self._tier.deleted_below, keys)


class RequestEvents:
    """Lookups and ends of requests, and what reloads from L2 take."""

    def __init__(
        self, tier: Tier, chunk_tokens: int, salt_of: SaltOf, on_error: OnError
    ) -> None:
        self._tier = tier
        self._chunk_tokens = chunk_tokens
        self._salt_of = salt_of
        self._on_error = on_error
        self._loads: dict[int, float] = {}
        self._unsalted: dict[str, Event] = {}  # lookups whose salt nobody said yet

    def subscribe(self, bus: Any) -> None:
        handlers = {
            EventType.MP_LOOKUP: self._on_lookup,
            EventType.MP_LOOKUP_PREFETCH_END: self._on_lookup_end,
            EventType.MP_REQUEST_END: self._on_end,
            EventType.L2_PREFETCH_LOAD_SUBMITTED: self._on_load,
            EventType.L2_PREFETCH_LOAD_COMPLETED: self._on_loaded,
        }
        for event_type, handler in handlers.items():
            bus.subscribe(event_type, self._guarded(event_type.value, handler))

    def _guarded(
        self, name: str, handler: Callable[[Event], None]
    ) -> Callable[[Event], None]:
        def call(event: Event) -> None:
            try:
                handler(event)
            except Exception as error:  # noqa: BLE001 - the bus must live on
                self._on_error(name, error)

        return call

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
        self._tier.lookup(
            event.session_id,
            data["model_name"],
            data["chunk_hashes"],
            data["seq_len"],
            salt,
        )

    def _on_end(self, event: Event) -> None:
        self._unsalted.pop(event.session_id, None)
        self._tier.ended(event.session_id)

    def _on_load(self, event: Event) -> None:
        if len(self._loads) > _MAX_OPEN:
            self._loads.clear()
        self._loads[event.metadata["request_id"]] = event.timestamp

    def _on_loaded(self, event: Event) -> None:
        began_s = self._loads.pop(event.metadata["request_id"], None)
        objects = event.metadata["loaded_count"]
        if began_s is not None and objects > 0:
            seconds = event.timestamp - began_s
            self._tier.reloaded(objects, self._chunk_tokens, seconds)


class SessionEvents:
    """Requests that stored something and looked nothing up: only the session knows
    what they have. Those that did are told of by `RequestEvents`, but for those whose
    engine died: their sessions are cleared away, and that is all."""

    def __init__(self, tier: Tier, on_error: OnError) -> None:
        self._tier = tier
        self._on_error = on_error

    def destroyed(self, session: Any) -> None:
        """LMCache's session is over."""
        try:
            key = session.lookup_ipc_key  # a store's, too, where nothing was looked up
            if key is not None and not session.prefetch_group_windows:
                hashes = [TokenHasher.hash_to_bytes(h) for h in session.get_hashes(0)]
                tokens = len(session.token_ids)
                self._tier.stored_by(
                    session.request_id, key.model_name, hashes, tokens, key.cache_salt
                )
            self._tier.session_gone(session.request_id)
        except Exception as error:  # noqa: BLE001 - LMCache's sessions must end
            self._on_error("session", error)
