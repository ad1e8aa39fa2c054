"""The threads of a store: for puts, for gets, and one that lets time pass."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

from ttlcache_lmcache.store.store import TieredStore

#: Seconds between two looks at what was not used for long.
INTERVAL_S = 1.0


class StoreThreads:
    """Loads wait for no stores: each have threads of their own."""

    def __init__(
        self, store: TieredStore, name: str, num_threads: int, logger: logging.Logger
    ) -> None:
        self._store = store
        self._logger = logger
        self.puts = ThreadPoolExecutor(num_threads, f"ttlcache-{name}-put")
        self.gets = ThreadPoolExecutor(num_threads, f"ttlcache-{name}-get")
        self._is_over = threading.Event()
        self._sweeper = threading.Thread(
            target=self._sweep, name=f"ttlcache-{name}-sweep", daemon=True
        )
        self._sweeper.start()

    @property
    def is_sweeping(self) -> bool:
        return self._sweeper.is_alive()

    def close(self) -> None:
        """Finish what was submitted, and close the store."""
        self._is_over.set()
        self._sweeper.join(timeout=10.0)
        self.puts.shutdown(wait=True)
        self.gets.shutdown(wait=True)
        self._store.close()

    def _sweep(self) -> None:
        while not self._is_over.wait(INTERVAL_S):
            try:
                self._store.sweep()
            except Exception:
                self._logger.exception("ttlcache: sweep failed")
