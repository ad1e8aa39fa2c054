"""Eviction by program inside `lmcache server`.

    lmcache server … --server-module \
        '{"module_path": "ttlcache_lmcache.server_module", "config": {…}}'

LMCache's documented extension point. It watches L1 and requests, and decides what
leaves L1 for a store.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from lmcache.v1.multiprocess.ext_server_module import server_module_handler

from ttlcache.clock import default_clock
from ttlcache.errors import ConfigError
from ttlcache_lmcache import compat, hints
from ttlcache_lmcache.adapters import otel
from ttlcache_lmcache.adapters.listeners import L1Events, RequestEvents
from ttlcache_lmcache.adapters.store_gate import StoreGate
from ttlcache_lmcache.config import SERVER_MODULE, ServerModuleConfig, load
from ttlcache_lmcache.retention.l1_tier import Tier


class TTLServerModule:
    """The glue: LMCache's server on one side, `Tier` on the other.

    Raises:
        ConfigError: the configuration is wrong, or LMCache's event bus is off.
        UnsupportedEngineError: an LMCache that was not tested.
    """

    def __init__(self, build_context: Any) -> None:
        config = load(ServerModuleConfig, build_context.config, SERVER_MODULE)
        version = compat.check_lmcache(allow_untested=config.allow_untested_lmcache)
        self._context = build_context.server_context
        if not self._context.event_bus.enabled:
            raise ConfigError(
                "ttlcache's server module needs LMCache's event bus to see lookups; "
                "remove --disable-observability (value: set, expected: not set)"
            )
        self._logger = compat.logger(__name__)
        self._storage = self._context.storage_manager
        self._l1 = compat.only_l1(self._storage)
        self.errors: Counter[str] = Counter()
        self.tier = Tier(config, default_clock(), self._used, self._is_evictable)
        if self._l1 is None:
            self._logger.warning("ttlcache: several L1s: LMCache's own eviction stays")
        else:
            self._attach()
        otel.export(self.tier, self.errors)
        self._logger.info(
            "ttlcache %s in LMCache %s: max_ttl_s=%g",
            compat.ttlcache_version(),
            version,
            config.max_ttl_s,
        )

    def _attach(self) -> None:
        gate = StoreGate(self.tier, self._delete, self._has_l2, self._on_error)
        gate.install(self._storage, self._l1)
        self._l1.register_listener(L1Events(self.tier, self._on_error))
        events = RequestEvents(self.tier, self._salt_of, self._on_error)
        events.subscribe(
            self._context.event_bus, self._context.session_manager.destroy_listeners
        )

    def _salt_of(self, request_id: str) -> str | None:
        session = self._context.session_manager.get(request_id)
        key = session.lookup_ipc_key if session is not None else None
        return None if key is None else str(key.cache_salt)

    def _has_l2(self) -> bool:
        return bool(self._storage.l2_adapters())

    # what LMCache calls

    @property
    def context(self) -> Any:
        return self._context

    def report_status(self) -> dict[str, Any]:
        status = {**self.tier.status(), "errors": dict(self.errors)}
        status["recent_turns"] = self.tier.recent_turns()
        return {"ttlcache": status}

    def close(self) -> None:
        return

    @server_module_handler(hints.SET_TTL)
    def set_ttl(self, payload: bytes) -> bytes:
        told = hints.decode(payload)
        for hint in told:
            try:
                self.tier.hint(hint)
            except Exception as error:  # noqa: BLE001 - the others are to be heard
                self._on_error("hint", error)
        return json.dumps({"accepted": len(told)}).encode()

    def _delete(self, keys: list[Any]) -> None:
        if keys:
            self._l1.delete(keys)

    def _is_evictable(self, key: Any) -> bool:
        return bool(self._l1.is_key_evictable(key))

    def _used(self) -> float:
        used, total = self._l1.get_memory_usage()
        return used / total if total else 0.0

    def _on_error(self, hook: str, error: BaseException) -> None:
        self.errors[hook] += 1
        if self.errors[hook] == 1:
            self._logger.error("ttlcache: %s failed", hook, exc_info=error)


def build_server_modules(build_context: Any) -> TTLServerModule:
    """What LMCache calls."""
    return TTLServerModule(build_context)
