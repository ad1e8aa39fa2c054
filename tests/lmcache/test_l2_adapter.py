"""The L2 adapter's queues, asked as LMCache asks. Real servers: tests/e2e."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="LMCache is an extra")

from lmcache.v1.distributed.api import ObjectKey

from ttlcache.clock import VirtualClock
from ttlcache_lmcache.adapters.l2_keys import encode_key
from ttlcache_lmcache.l2_adapter import MAX_WAIT_S, TTLL2Adapter
from ttlcache_lmcache.store import object_file

SIZE = 1 << 12
PATIENCE_S = 30.0


class Object:
    """Stands for LMCache's `MemoryObj`; `is_touched` once somebody has its memory."""

    def __init__(self, fill: int, may_go: threading.Event | None = None) -> None:
        self.buffer = bytearray([fill]) * SIZE
        self.is_touched = False
        self._may_go = may_go

    @property
    def byte_array(self) -> memoryview:
        self.is_touched = True
        if self._may_go is not None:
            self._may_go.wait(PATIENCE_S)
        return memoryview(self.buffer)


def key(number: int) -> ObjectKey:
    return ObjectKey(chunk_hash=number.to_bytes(8, "big"), model_name="m", kv_rank=0)


def until(found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while (result := found()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return result


class Adapter:
    """One thread for each kind of task, and a clock that stands still."""

    def __init__(self, folder: Path, num_threads: int = 1) -> None:
        self.clock = VirtualClock(1000.0)
        params = {
            "path": str(folder),
            "disk_bytes": 1 << 20,
            "num_threads": num_threads,
        }
        self.inner: Any = TTLL2Adapter(params, clock=self.clock)
        self._results: dict[int, Any] = {}

    def store_all(self, objects: list[Object]) -> int:
        keys = [key(number) for number in range(len(objects))]
        return int(self.inner.submit_store_task(keys, objects))

    def load_all(self, objects: list[Object]) -> list[bool]:
        keys = [key(number) for number in range(len(objects))]
        self.inner.submit_lookup_and_lock_task(keys, {})
        task = self.inner.submit_load_task(keys, objects)
        loaded = until(lambda: self.inner.query_load_result(task))
        return [bool(loaded.test(number)) for number in range(len(keys))]

    def store(self, number: int, each: Object) -> int:
        return int(self.inner.submit_store_task([key(number)], [each]))

    def is_stored(self, task: int) -> bool:
        def found() -> Any:
            self._results.update(self.inner.pop_completed_store_tasks())
            return self._results.get(task)

        return bool(until(found).is_successful())

    def load(self, number: int, each: Object) -> int:
        self.has(number)  # LMCache looks up, and so locks, what it loads
        return int(self.inner.submit_load_task([key(number)], [each]))

    def is_loaded(self, task: int) -> bool:
        return bool(until(lambda: self.inner.query_load_result(task)).test(0))

    def has(self, number: int) -> bool:
        task = self.inner.submit_lookup_and_lock_task([key(number)], {})
        return bool(self.inner.query_lookup_and_lock_result(task).test(0))


@pytest.fixture
def adapter(tmp_path: Path) -> Iterator[Adapter]:
    made = Adapter(tmp_path)
    yield made
    made.inner.close()


def test_a_damaged_object_of_a_task_is_the_only_miss(tmp_path: Path) -> None:
    adapter = Adapter(tmp_path, num_threads=4)
    assert adapter.is_stored(adapter.store_all([Object(n) for n in range(9)]))
    damaged = object_file.path_of(tmp_path, encode_key(key(4)))
    raw = bytearray(damaged.read_bytes())
    raw[-SIZE // 2] ^= 1
    damaged.write_bytes(raw)
    targets = [Object(255) for _ in range(9)]
    found = adapter.load_all(targets)
    assert found == [number != 4 for number in range(9)]
    for number, target in enumerate(targets):
        assert number == 4 or target.buffer == Object(number).buffer
    counts = adapter.inner.report_status()["counts"]
    assert (counts["disk_hits"], counts["corrupt"]) == (8, 1)
    assert not adapter.has(4)
    adapter.inner.close()


def test_a_task_that_the_disk_refuses_in_part_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = Adapter(tmp_path, num_threads=4)
    real, refused = os.writev, itertools.count()

    def sometimes(fd: int, buffers: Any) -> int:
        if next(refused) == 2:
            raise OSError(28, "No space left on device")
        return real(fd, buffers)

    monkeypatch.setattr(os, "writev", sometimes)
    assert not adapter.is_stored(adapter.store_all([Object(n) for n in range(9)]))
    assert sum(adapter.has(number) for number in range(9)) == 8
    assert adapter.inner.report_status()["counts"]["write_errors"] == 1
    adapter.inner.close()


def test_tasks_of_nothing_are_answered(adapter: Adapter) -> None:
    assert adapter.is_stored(adapter.store_all([]))
    assert adapter.load_all([]) == []


def test_a_load_does_not_wait_for_stores(adapter: Adapter) -> None:
    assert adapter.is_stored(adapter.store(0, Object(7)))
    disk_moves, target = threading.Event(), Object(0)
    try:
        adapter.store(1, Object(1, disk_moves))
        adapter.store(2, Object(2))
        assert adapter.is_loaded(adapter.load(0, target))
    finally:
        disk_moves.set()
    assert target.buffer == Object(7).buffer


def test_a_store_that_waited_too_long_reads_nothing(adapter: Adapter) -> None:
    """LMCache's lock on the memory may have run out: another context's KV is there."""
    disk_moves, late = threading.Event(), Object(2)
    first = adapter.store(1, Object(1, disk_moves))
    second = adapter.store(2, late)
    adapter.clock.advance(MAX_WAIT_S + 1.0)
    in_time = adapter.store(3, Object(3))
    disk_moves.set()
    assert adapter.is_stored(first)
    assert not adapter.is_stored(second)
    assert adapter.is_stored(in_time)
    assert not late.is_touched
    assert [adapter.has(number) for number in (1, 2, 3)] == [True, False, True]


def test_a_load_that_waited_too_long_writes_nothing(adapter: Adapter) -> None:
    assert adapter.is_stored(adapter.store(0, Object(7)))
    disk_moves, late = threading.Event(), Object(0)
    first = adapter.load(0, Object(0, disk_moves))
    second = adapter.load(0, late)
    adapter.clock.advance(MAX_WAIT_S + 1.0)
    disk_moves.set()
    assert adapter.is_loaded(first)
    assert not adapter.is_loaded(second)
    assert not late.is_touched
