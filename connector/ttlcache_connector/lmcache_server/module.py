"""Runs inside the LMCache server: what a worker never wrote is nobody's hit.

`lmcache server --server-module '{"module_path": "ttlcache_connector.lmcache_module"}'`,
LMCache's documented extension point. A worker gets slots, copies, and commits. LMCache
0.5 commits for a worker that left or died in between: whatever lay in its slots would
be read as KV from then on, by every replica, and go to disk. A worker of ours leaves so
whenever it ends during a copy.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from lmcache.v1.multiprocess.ext_server_module import server_module_handler

from ttlcache_connector.log import logger
from ttlcache_lmcache import internals

log = logger(__name__)


class TornStores:
    """Forgets the stores that workers left half-way.

    It can be asked for their number. LMCache answers calls of modules only where one
    has any: without that a hint to a server without the retention module would be an
    error in its log, and no refusal.
    """

    def __init__(self, build_context: Any) -> None:
        self.context = build_context.server_context
        self._count = 0
        # LMCache's own modules; those that hand out no slots are left alone.
        for module in build_context.modules:
            if internals.hands_out_slots(module):
                internals.on_worker_gone(module, partial(self._forget, module))
            elif type(module).__name__ == "EngineDrivenTransferModule":
                log.warning(
                    "ttlcache: this LMCache's transfer module looks different: a store "
                    "that a worker leaves half-way may be read as if it were whole"
                )

    def report_status(self) -> dict[str, Any]:
        return {"ttlcache_torn_stores": self._count}

    def close(self) -> None:
        return

    @server_module_handler("ttlcache.torn_stores")
    def torn_stores(self, payload: bytes) -> bytes:
        return b"%d" % self._count

    def _forget(self, module: Any, instance_id: int) -> None:
        if torn := internals.drop_open_stores(module, instance_id):
            self._count += torn
            log.info("ttlcache: worker %d left %d stores half-way", instance_id, torn)


#: What LMCache calls.
build_server_modules = TornStores
