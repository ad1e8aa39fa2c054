"""A disk tier behind LMCache's L1.

    lmcache server … --l2-adapter '{"type": "plugin",
        "module_path": "ttlcache_lmcache.l2_adapter", "class_name": "TTLL2Adapter",
        "adapter_params": {"path": "/nvme/kv", "disk_bytes": 500000000000}}'

LMCache polls: it submits a task, waits for the event of its kind, and asks for the
result once. Copies run on thread pools, where loads wait for no stores; lookups are
answered at once.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface, L2TaskId
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from ttlcache.clock import Clock, default_clock
from ttlcache_lmcache import compat
from ttlcache_lmcache.adapters import otel
from ttlcache_lmcache.adapters.l2_objects import L2Notifications, encode_key
from ttlcache_lmcache.config import L2_ADAPTER, DiskConfig, load
from ttlcache_lmcache.store.store import FAULTS, DiskStore, StoreThreads

#: Seconds after which a task that waited no longer touches L1's memory. LMCache's locks
#: on it run out (--l1-read-ttl-seconds, --l1-write-ttl-seconds; 300 at least), and then
#: it may be another context's.
MAX_WAIT_S = 60.0


class TTLL2Adapter(L2AdapterInterface):
    """LMCache's side of `DiskStore`.

    Raises:
        ConfigError: wrong parameters, or a folder that cannot be used.
        UnsupportedEngineError: an LMCache that was not tested.
    """

    def __init__(
        self,
        params: Mapping[str, Any],
        l1_memory_desc: L1MemoryDesc | None = None,
        clock: Clock | None = None,
    ) -> None:
        config = load(DiskConfig, params, L2_ADAPTER)
        compat.check_lmcache(allow_untested=config.allow_untested_lmcache)
        super().__init__(max_capacity_bytes=config.disk_bytes)
        self._logger = compat.logger(__name__)
        self._store_event = create_event_notifier()
        self._lookup_event = create_event_notifier()
        self._load_event = create_event_notifier()
        self._tasks = itertools.count(1)
        self._lock = threading.Lock()
        self._stored: dict[L2TaskId, L2StoreResult] = {}
        self._looked_up: dict[L2TaskId, Bitmap] = {}
        self._loaded: dict[L2TaskId, Bitmap] = {}
        self._clock = clock if clock is not None else default_clock()
        self._store = DiskStore(
            config,
            self._clock,
            lambda gone: self._notifications.removed(gone),
            self._logger,
        )
        self._notifications = L2Notifications(
            self._store.find, self._notify_keys_stored, self._notify_keys_deleted
        )
        found = [header.key for header in self._store.headers()]
        self._notifications.stored(found)
        self._num_threads = config.num_threads
        self._threads = StoreThreads(
            self._store, "l2", config.num_threads, self._logger
        )
        otel.export_faults(config.path, self._faults)
        self._logger.info(
            "ttlcache L2 tier at %s: %d bytes on disk, %d objects found",
            config.path,
            config.disk_bytes,
            len(found),
        )

    # events

    def get_store_event_fd(self) -> int:
        return int(self._store_event.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._lookup_event.fileno())

    def get_load_event_fd(self) -> int:
        return int(self._load_event.fileno())

    # store

    def submit_store_task(
        self, keys: list[ObjectKey], objects: list[MemoryObj]
    ) -> L2TaskId:
        task, sizes = next(self._tasks), [0] * len(keys)
        raws = [encode_key(key) for key in keys]

        def store(index: int) -> bool:
            data = objects[index].byte_array
            kept = self._store.put(raws[index], data)
            sizes[index] = len(data) if kept else 0
            return kept

        def finish(kept: list[bool]) -> None:
            with self._lock:
                self._stored[task] = L2StoreResult(all(kept), sum(sizes))
            self._store_event.notify()
            self._notifications.stored(list(itertools.compress(raws, kept)))

        self._run(self._threads.puts, len(keys), store, finish)
        return task

    def pop_completed_store_tasks(self) -> dict[L2TaskId, L2StoreResult]:
        with self._lock:
            done, self._stored = self._stored, {}
        return done

    # lookup

    def submit_lookup_and_lock_task(
        self,
        keys: list[ObjectKey],
        group_layout_descs: dict[int, MemoryLayoutDesc],
    ) -> L2TaskId:
        task = next(self._tasks)
        found = self._store.lock([encode_key(key) for key in keys])
        with self._lock:
            self._looked_up[task] = _bitmap(found)
        self._lookup_event.notify()
        return task

    def query_lookup_and_lock_result(self, task_id: L2TaskId) -> Bitmap | None:
        with self._lock:
            return self._looked_up.pop(task_id, None)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        self._store.unlock([encode_key(key) for key in keys])

    # load

    def submit_load_task(
        self, keys: list[ObjectKey], objects: list[MemoryObj]
    ) -> L2TaskId:
        task = next(self._tasks)

        def load(index: int) -> bool:
            buffer = memoryview(objects[index].byte_array)
            return self._store.read_into(encode_key(keys[index]), buffer)

        def finish(found: list[bool]) -> None:
            loaded = list(itertools.compress(keys, found))
            with self._lock:
                self._loaded[task] = _bitmap(found)
            self._load_event.notify()
            if loaded:
                self._notify_keys_accessed(loaded)

        self._run(self._threads.gets, len(keys), load, finish)
        return task

    def query_load_result(self, task_id: L2TaskId) -> Bitmap | None:
        with self._lock:
            return self._loaded.pop(task_id, None)

    # management

    def delete(self, keys: list[ObjectKey]) -> None:
        """Remove objects; those that a lookup promised to a load stay."""
        gone = self._store.delete([encode_key(key) for key in keys])
        self._notifications.removed(gone)

    def report_status(self) -> dict[str, Any]:
        return {
            "is_healthy": self._threads.is_sweeping,
            "type": "TTLL2Adapter",
            **self._store.status(),
        }

    def _faults(self) -> dict[str, int]:
        return {name: self._store.counts[name] for name in (*FAULTS, "late")}

    def close(self) -> None:
        """Finish what was submitted."""
        self._threads.close()
        for event in (self._store_event, self._lookup_event, self._load_event):
            event.close()

    # inside

    def _run(
        self,
        pool: ThreadPoolExecutor,
        count: int,
        work: Callable[[int], bool],
        finish: Callable[[list[bool]], None],
    ) -> None:
        """Do `work` for each object of a task, on several threads; `finish` gets what
        each returned, False for one that failed or whose time was over."""
        done, left = [False] * count, count
        indexes = iter(range(count))  # shared: each thread takes the next
        until_s = self._clock.now_s() + MAX_WAIT_S

        def some() -> None:
            nonlocal left
            for index in indexes:
                try:
                    if self._clock.now_s() <= until_s:
                        done[index] = work(index)
                    else:
                        self._store.counts["late"] += 1
                except Exception:
                    self._logger.exception("ttlcache: L2 task failed")
                with self._lock:
                    left -= 1
                    is_last = not left
                if is_last:
                    finish(done)

        if not count:
            finish(done)
        for _ in range(min(count, self._num_threads)):
            pool.submit(some)


def _bitmap(found: Sequence[bool]) -> Bitmap:
    bitmap = Bitmap(len(found))
    for index, hit in enumerate(found):
        if hit:
            bitmap.set(index)
    return bitmap
