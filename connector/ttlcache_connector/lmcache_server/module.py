"""Runs inside the LMCache server: tells from which tier a lookup was served.

`lmcache server --server-module '{"module_path": "ttlcache_connector.lmcache_module"}'`,
LMCache's documented extension point. Its clients learn only how many chunks were
found; what a reload costs depends on whether they came from CPU memory or disk.
It also forgets stores that workers left half-way (`torn_stores`).
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import Any

from lmcache.v1.mp_observability.event import Event, EventType
from lmcache.v1.multiprocess.ext_server_module import server_module_handler

from ttlcache_connector.lmcache_server import rpc
from ttlcache_connector.lmcache_server.torn_stores import forget_torn_stores

#: Lookups remembered; a load is asked about within seconds.
MEMORY = 4096


class LookupTiers:
    """Remembers the last lookups' results by request."""

    def __init__(self, build_context: Any) -> None:
        self._context = build_context.server_context
        self._lock = threading.Lock()
        self._found: OrderedDict[str, dict[str, int]] = OrderedDict()
        self._context.event_bus.subscribe(
            EventType.MP_LOOKUP_PREFETCH_END, self._on_lookup
        )

    @property
    def context(self) -> Any:
        return self._context

    def report_status(self) -> dict[str, Any]:
        with self._lock:
            return {"ttlcache_lookups": len(self._found)}

    def close(self) -> None:
        return

    @server_module_handler(rpc.LOOKUP_TIERS)
    def lookup_tiers(self, payload: bytes) -> bytes:
        with self._lock:
            found = self._found.get(json.loads(payload), {})
        return json.dumps(found).encode()

    def _on_lookup(self, event: Event) -> None:
        data = event.metadata
        with self._lock:
            self._found[event.session_id] = {
                "cpu": data["l1_hit_tokens"],
                "disk": data["l2_hit_tokens"],
            }
            self._found.move_to_end(event.session_id)
            while len(self._found) > MEMORY:
                self._found.popitem(last=False)


def build_server_modules(build_context: Any) -> LookupTiers:
    """What LMCache calls."""
    forget_torn_stores(build_context.modules)
    return LookupTiers(build_context)
