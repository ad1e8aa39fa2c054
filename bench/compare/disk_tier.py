"""What verifying costs: `serve-tiers`'s disk tier against LMCache's `fs_native`.

Both adapters are made by LMCache's own factory and asked as its controllers ask: tasks
of several objects, a few under way, objects in LMCache's own memory. Rounds alternate
which goes first, and each has new objects. Nothing is synced by either, so `store` and
`load` measure the page cache, where a digest weighs most; `cold load` reads from the
device. CPU seconds are those of the whole process: on a busy machine they say more than
the clock.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator
from lmcache.v1.memory_management import MemoryFormat, MemoryObj

from bench.compare.rounds import in_turn
from bench.ratios import Ratio
from ttlcache_connector.lmcache_server.launch import TierOptions

VERIFIED, UNVERIFIED = "verified", "unverified"
STORE, LOAD, COLD_LOAD = "store", "load", "cold load"
#: Objects a task: a turn's new chunks.
TASK_OBJECTS = 8
TASKS_UNDER_WAY = 2
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Shape:
    """What is stored and loaded in one round."""

    objects: int
    object_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.objects * self.object_bytes


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one pass over all objects."""

    wall_s: float
    cpu_s: float


#: Costs by arm and measure, one a round.
Costs = dict[str, dict[str, list[Cost]]]


def adapter_spec(arm: str, folder: Path, disk_gb: float) -> dict[str, Any]:
    """`--l2-adapter` of an arm."""
    if arm == UNVERIFIED:
        return {"type": "fs_native", "base_path": str(folder)}
    command = TierOptions(disk=folder, disk_gb=disk_gb).command()
    spec: dict[str, Any] = json.loads(command[command.index("--l2-adapter") + 1])
    return spec


class Driver:
    """One adapter, asked as LMCache's store and prefetch controllers do."""

    def __init__(self, spec: dict[str, Any]) -> None:
        arguments = argparse.Namespace(l2_adapter=[json.dumps(spec)])
        (config,) = parse_args_to_l2_adapters_config(arguments).adapters
        self._adapter: Any = create_l2_adapter(config)

    def store(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> Cost:
        """Until the last object is reported stored."""
        submit, done = self._adapter.submit_store_task, {}

        def is_done(task: int) -> bool:
            done.update(self._adapter.pop_completed_store_tasks())
            if task not in done:
                return False
            if not done.pop(task).is_successful():
                raise RuntimeError("an object was not stored")
            return True

        event_fd = self._adapter.get_store_event_fd()
        return self._run(submit, is_done, event_fd, keys, objects)

    def load(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> Cost:
        """Until the last object is loaded; lookups are not counted."""
        lookup = self._adapter.submit_lookup_and_lock_task(list(keys), {})
        found = None
        while found is None:
            found = self._adapter.query_lookup_and_lock_result(lookup)

        def is_done(task: int) -> bool:
            loaded = self._adapter.query_load_result(task)
            if loaded is None:
                return False
            if loaded.popcount() != TASK_OBJECTS:
                raise RuntimeError("an object was not loaded")
            return True

        event_fd = self._adapter.get_load_event_fd()
        submit = self._adapter.submit_load_task
        cost = self._run(submit, is_done, event_fd, keys, objects)
        self._adapter.submit_unlock(list(keys))
        return cost

    def _run(
        self,
        submit: Callable[..., int],
        is_done: Callable[[int], bool],
        event_fd: int,
        keys: Sequence[ObjectKey],
        objects: Sequence[MemoryObj],
    ) -> Cost:
        poller = select.poll()
        poller.register(event_fd, select.POLLIN)
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        starts = list(range(0, len(keys), TASK_OBJECTS))
        under_way: set[int] = set()
        while starts or under_way:
            while starts and len(under_way) < TASKS_UNDER_WAY:
                part = slice(starts[0], starts.pop(0) + TASK_OBJECTS)
                under_way.add(submit(list(keys[part]), list(objects[part])))
            if not poller.poll(_PATIENCE_S * 1000):
                raise RuntimeError("no answer")
            os.read(event_fd, 8)
            under_way -= {task for task in under_way if is_done(task)}
        return Cost(time.perf_counter() - wall_s, time.process_time() - cpu_s)

    def delete(self, keys: Sequence[ObjectKey]) -> None:
        self._adapter.delete(list(keys))

    def close(self) -> None:
        self._adapter.close()


class Bench:
    """Memory as LMCache's L1 has it, filled once, and read back into zeros."""

    def __init__(self, shape: Shape, folder: Path, *, cold: bool = False) -> None:
        self._shape = shape
        self._cold = cold
        self._folder = folder
        self._memory = MixedMemoryAllocator(2 * shape.total_bytes + (1 << 20))
        size = torch.Size([shape.object_bytes])
        count, kind = shape.objects, MemoryFormat.KV_2LTD
        self._from = self._memory.batched_allocate(size, torch.uint8, count, kind)
        self._into = self._memory.batched_allocate(size, torch.uint8, count, kind)
        if self._from is None or self._into is None:
            raise MemoryError(f"no room for {2 * shape.total_bytes} bytes")
        generator = torch.Generator().manual_seed(0)
        for each in self._from:
            each.raw_data.random_(generator=generator)
        disk_gb = 2 * shape.total_bytes / 2**30
        self._drivers = {
            arm: Driver(adapter_spec(arm, folder / arm, disk_gb))
            for arm in (VERIFIED, UNVERIFIED)
        }
        self._numbers = itertools.count()

    def one(self, arm: str) -> dict[str, Cost]:
        """Every measure, of objects that are new."""
        driver = self._drivers[arm]
        keys = [
            ObjectKey(next(self._numbers).to_bytes(16, "big"), "model", 0)
            for _ in self._from
        ]
        costs = {STORE: driver.store(keys, self._from)}
        costs[LOAD] = self._load(driver, keys)
        if self._cold:
            forget_pages(self._folder / arm)
            costs[COLD_LOAD] = self._load(driver, keys)
        driver.delete(keys)
        return costs

    def _load(self, driver: Driver, keys: Sequence[ObjectKey]) -> Cost:
        for each in self._into:
            each.raw_data.zero_()
        cost = driver.load(keys, self._into)
        pairs = zip(self._from, self._into, strict=True)
        if not all(torch.equal(a.raw_data, b.raw_data) for a, b in pairs):
            raise RuntimeError("other bytes came back")
        return cost

    def rounds(self, count: int) -> Costs:
        found: Costs = {VERIFIED: {}, UNVERIFIED: {}}
        for arm in found:
            self.one(arm)  # threads, folders, first touches
        for _, arm in in_turn((UNVERIFIED, VERIFIED), count):
            for name, cost in self.one(arm).items():
                found[arm].setdefault(name, []).append(cost)
        return found

    def close(self) -> None:
        for driver in self._drivers.values():
            driver.close()
        for each in (*self._from, *self._into):
            each.ref_count_down()
        self._memory.close()


def forget_pages(folder: Path) -> None:
    """Let the page cache lose every file below."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def ratio(found: Costs, measure: str, seconds: str) -> Ratio:
    """Verified over unverified, by round: bytes by `wall_s` or by `cpu_s`."""
    pairs = zip(found[VERIFIED][measure], found[UNVERIFIED][measure], strict=True)
    return Ratio(
        tuple(
            getattr(theirs, seconds) / getattr(ours, seconds) for ours, theirs in pairs
        )
    )
