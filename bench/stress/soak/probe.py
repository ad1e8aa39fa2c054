"""TTLConnector that also weighs ttlcache's own objects, for the soak.

Selected by `kv_connector_module_path`; production code knows nothing of it. It asks
Python's allocator, so libraries that vLLM shares with us are left out, and what vLLM's
kernels hold does not blur it. It looks once, when the agents have ended: a look takes
memory and gives it back, which leaves holes in the heap whose growth the soak judges
(+52 MiB in 20 minutes with a look every 15 seconds, +34 with one every two minutes).
"""

from __future__ import annotations

import os
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

from bench.stress.soak.watch import PROBE_VARIABLE
from ttlcache_connector.connector import TTLConnector

#: Files whose allocations are ours: nobody else in the engine sorts with that library.
OURS = ("*/ttlcache/*", "*/ttlcache_connector/*", "*/sortedcontainers/*")
_MIB = 1 << 20
_POLL_S = 0.5


class ProbedTTLConnector(TTLConnector):
    """Traces allocations from the moment the pool exists."""

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        tracemalloc.start()
        super().bind_kv_cache_manager(kv_cache_manager)
        path = Path(os.environ[PROBE_VARIABLE])
        threading.Thread(target=_look, args=(path,), daemon=True).start()


def _look(path: Path) -> None:
    """Write the MiB into the file once it exists."""
    while not path.exists():
        time.sleep(_POLL_S)
    path.write_text(f"{own_mib():.2f}\n")


def own_mib() -> float:
    """MiB that live objects allocated by our code hold; tracing must be on."""
    ours = [tracemalloc.Filter(True, pattern) for pattern in OURS]
    snapshot = tracemalloc.take_snapshot().filter_traces(ours)
    return sum(trace.size for trace in snapshot.traces) / _MIB
