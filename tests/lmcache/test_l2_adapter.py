"""The L2 adapter's queues, asked as LMCache asks. Real servers: tests/e2e."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="LMCache is an extra")

from lmcache.v1.distributed.api import ObjectKey

from ttlcache.clock import VirtualClock
from ttlcache_lmcache.adapters.l2_objects import encode_key
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
    """Tasks for it as LMCache submits them, and a clock that stands still.

    The keys of a task count from `first`; it has as many as it has objects.
    """

    def __init__(self, folder, num_threads) -> None:
        self.clock = VirtualClock(1000.0)
        params = {"path": str(folder), "disk_bytes": 1 << 20}
        params["num_threads"] = num_threads
        self.inner: Any = TTLL2Adapter(params, clock=self.clock)
        self._results: dict[int, Any] = {}

    def store(self, *objects: Object, first: int = 0) -> int:
        return int(self.inner.submit_store_task(keys(objects, first), list(objects)))

    def is_stored(self, task: int) -> bool:
        def found() -> Any:
            self._results.update(self.inner.pop_completed_store_tasks())
            return self._results.get(task)

        return bool(until(found).is_successful())

    def load(self, *objects: Object) -> int:
        wanted = keys(objects)  # LMCache looks up, and so locks, what it loads
        self.inner.submit_lookup_and_lock_task(wanted, {})
        return int(self.inner.submit_load_task(wanted, list(objects)))

    def loaded(self, task: int, count: int = 1) -> list[bool]:
        result = until(lambda: self.inner.query_load_result(task))
        return [bool(result.test(number)) for number in range(count)]

    def has(self, number: int) -> bool:
        task = self.inner.submit_lookup_and_lock_task([key(number)], {})
        return bool(self.inner.query_lookup_and_lock_result(task).test(0))


def keys(objects, first: int = 0) -> list[ObjectKey]:
    return [key(first + number) for number in range(len(objects))]


@pytest.fixture
def make_adapter(tmp_path):
    made = []

    def make(num_threads: int) -> Adapter:
        made.append(Adapter(tmp_path, num_threads))
        return made[-1]

    yield make
    for each in made:
        each.inner.close()


@pytest.fixture
def adapter(make_adapter):
    """One thread for each kind of task."""
    return make_adapter(1)


def test_a_damaged_object_of_a_task_is_the_only_miss(make_adapter, tmp_path):
    adapter = make_adapter(4)
    assert adapter.is_stored(adapter.store(*map(Object, range(9))))
    damaged = object_file.path_of(tmp_path, encode_key(key(4)))
    raw = bytearray(damaged.read_bytes())
    raw[-SIZE // 2] ^= 1
    damaged.write_bytes(raw)
    targets = [Object(255) for _ in range(9)]
    found = adapter.loaded(adapter.load(*targets), 9)
    assert found == [number != 4 for number in range(9)]
    for number, target in enumerate(targets):
        assert number == 4 or target.buffer == Object(number).buffer
    counts = adapter.inner.report_status()["counts"]
    assert (counts["disk_hits"], counts["corrupt"]) == (8, 1)
    assert not adapter.has(4)


def test_a_task_that_the_disk_refuses_in_part_failed(make_adapter, monkeypatch):
    adapter = make_adapter(4)
    real, refused = os.write, itertools.count()

    def sometimes(fd: int, buffers: Any) -> int:
        if next(refused) == 2:
            raise OSError(5, "Input/output error")
        return real(fd, buffers)

    monkeypatch.setattr(os, "write", sometimes)
    assert not adapter.is_stored(adapter.store(*map(Object, range(9))))
    assert sum(adapter.has(number) for number in range(9)) == 8
    assert adapter.inner.report_status()["counts"]["write_errors"] == 1


def test_tasks_of_nothing_are_answered(adapter):
    assert adapter.is_stored(adapter.store())
    assert adapter.loaded(adapter.load(), 0) == []


def test_a_load_does_not_wait_for_stores(adapter):
    assert adapter.is_stored(adapter.store(Object(7)))
    disk_moves, target = threading.Event(), Object(0)
    try:
        adapter.store(Object(1, disk_moves), first=1)
        adapter.store(Object(2), first=2)
        assert adapter.loaded(adapter.load(target)) == [True]
    finally:
        disk_moves.set()
    assert target.buffer == Object(7).buffer


def test_a_store_that_waited_too_long_reads_nothing(adapter):
    """LMCache's lock on the memory may have run out: another context's KV is there."""
    disk_moves, late = threading.Event(), Object(2)
    tasks = [adapter.store(Object(1, disk_moves)), adapter.store(late, first=1)]
    adapter.clock.advance(MAX_WAIT_S + 1.0)
    tasks.append(adapter.store(Object(3), first=2))
    disk_moves.set()
    assert [adapter.is_stored(task) for task in tasks] == [True, False, True]
    assert not late.is_touched
    assert [adapter.has(number) for number in range(3)] == [True, False, True]


def test_a_load_that_waited_too_long_writes_nothing(adapter):
    assert adapter.is_stored(adapter.store(Object(7)))
    disk_moves, late = threading.Event(), Object(0)
    tasks = [adapter.load(Object(0, disk_moves)), adapter.load(late)]
    adapter.clock.advance(MAX_WAIT_S + 1.0)
    disk_moves.set()
    assert [adapter.loaded(task) for task in tasks] == [[True], [False]]
    assert not late.is_touched
