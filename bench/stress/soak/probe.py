"""TTLConnector that also weighs ttlcache's own objects, for the soak.

Selected by `kv_connector_module_path`; production code knows nothing of it. It asks
Python's allocator, so libraries that vLLM shares with us are left out, and what vLLM's
kernels hold does not blur it.
"""

from __future__ import annotations

import json
import os
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

from bench.stress.soak.watch import PROBE_VARIABLE
from ttlcache_connector.connector import TTLConnector

#: Seconds between two looks: each stops the engine for some 100 milliseconds, and the
#: memory it takes and gives back leaves holes in the heap. Every 15 seconds let the
#: engine core's resident memory grow by 52 MiB in 20 minutes; without looks it stays.
EVERY_S = 120.0
#: Files whose allocations are ours: nobody else in the engine sorts with that library.
OURS = ("*/ttlcache/*", "*/ttlcache_connector/*", "*/sortedcontainers/*")
_MIB = 1 << 20


class ProbedTTLConnector(TTLConnector):
    """Traces allocations from the moment the pool exists."""

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        tracemalloc.start()
        super().bind_kv_cache_manager(kv_cache_manager)
        path = Path(os.environ[PROBE_VARIABLE])
        threading.Thread(target=_look, args=(path,), daemon=True).start()


def _look(path: Path) -> None:
    began_s = time.monotonic()
    with path.open("w", buffering=1) as file:
        while True:
            time.sleep(EVERY_S)
            at_s = time.monotonic() - began_s
            file.write(json.dumps({"at_s": at_s, "own_mib": own_mib()}) + "\n")


def own_mib() -> float:
    """MiB that live objects allocated by our code hold; tracing must be on."""
    ours = [tracemalloc.Filter(True, pattern) for pattern in OURS]
    snapshot = tracemalloc.take_snapshot().filter_traces(ours)
    return sum(trace.size for trace in snapshot.traces) / _MIB
