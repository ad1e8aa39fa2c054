"""The in-process plugin under LMCache's own StorageManager parts.

Each test is one of the defects of LMCache 0.5.6's own disk backend that was proven
by running it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="LMCache is an extra")

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from ttlcache.errors import ConfigError
from ttlcache_lmcache.storage_plugin import TTLStoragePlugin
from ttlcache_lmcache.store import object_file

SHAPE = torch.Size([2, 2, 16, 64])


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever, daemon=True)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join(10.0)


def engine_config(folder: Path, **extra: Any) -> LMCacheEngineConfig:
    ours = {
        "module_path": "ttlcache_lmcache.storage_plugin",
        "class_name": "TTLStoragePlugin",
        "path": str(folder / "ours"),
        "disk_bytes": 1 << 24,
        **extra,
    }
    return LMCacheEngineConfig.from_defaults(
        chunk_size=16,
        local_cpu=False,
        max_local_cpu_size=0.05,
        pre_caching_hash_algorithm="sha256_cbor",
        storage_plugins=["ttl"],
        extra_config={f"storage_plugin.ttl.{key}": each for key, each in ours.items()},
    )


def metadata() -> LMCacheMetadata:
    return LMCacheMetadata(
        model_name="toy",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.float32,
        kv_shape=(2, 2, 16, 1, 64),
        role="worker",
        chunk_size=16,
    )


class Plugin:
    """The plugin with LMCache's allocator, as LMCache builds it."""

    def __init__(self, folder: Path, loop: asyncio.AbstractEventLoop) -> None:
        self.config = engine_config(folder)
        self.cpu = LocalCPUBackend(self.config, metadata(), "cpu")
        self.loop = loop
        self.backend = self.make()

    def make(self) -> TTLStoragePlugin:
        return TTLStoragePlugin("cpu", self.config, metadata(), self.cpu, self.loop)

    def fill(self, number: int) -> Any:
        each = self.cpu.allocate(SHAPE, torch.float32, MemoryFormat.KV_2LTD)
        assert each is not None
        each.tensor.copy_(tensor(number))
        return each

    def put(self, *numbers: int) -> None:
        for number in numbers:
            each = self.fill(number)
            for future in self.backend.batched_submit_put_task([key(number)], [each]):
                future.result(timeout=60.0)
            each.ref_count_down()

    def has(self, number: int) -> bool:
        """A hit, and then with the right bytes."""
        each = self.backend.get_blocking(key(number))
        if each is None:
            return False
        assert is_tensor(each, number)
        each.ref_count_down()
        return True

    def ask(self, question: Any, patience_s: float = 60.0) -> Any:
        """Of its asynchronous calls."""
        future = asyncio.run_coroutine_threadsafe(question, self.loop)
        return future.result(patience_s)


def tensor(number: int) -> torch.Tensor:
    return torch.rand(SHAPE, generator=torch.Generator().manual_seed(number))


def is_tensor(found: Any, number: int) -> bool:
    return torch.equal(found.tensor.reshape(SHAPE), tensor(number))


def key(number: int) -> CacheEngineKey:
    return CacheEngineKey("toy", 1, 0, number, torch.float32)


@pytest.fixture
def plugin(tmp_path: Path, loop: asyncio.AbstractEventLoop) -> Iterator[Plugin]:
    made = Plugin(tmp_path, loop)
    yield made
    made.backend.close()


def test_bytes_shape_and_type_come_back_also_after_a_restart(plugin):
    """LMCache's index lives in memory only: its files are orphans afterwards."""
    plugin.put(*range(5))
    for _ in range(2):
        assert all(map(plugin.has, range(5)))
        assert not plugin.has(99)
        plugin.backend.close()
        plugin.backend = plugin.make()
    backend = plugin.backend
    assert backend.batched_contains([key(0), key(1), key(9)], pin=True) == 2
    assert not backend.remove(key(0))  # pinned
    assert backend.unpin(key(0))
    assert backend.remove(key(0))
    assert not backend.contains(key(0))
    assert backend.unpin(key(1))
    # Removing gives the quota back: LMCache's `remove` leaks it.
    assert backend.status()["disk_bytes"] != 0
    assert backend.batched_remove([key(n) for n in range(1, 5)]) == 4
    assert backend.status()["disk_bytes"] == 0


def test_a_missing_file_is_a_miss_and_leaks_no_memory(plugin, tmp_path):
    """LMCache's raises KeyError and loses the staging object."""
    plugin.put(1)
    free = plugin.cpu.memory_allocator.memcheck()
    for path in (tmp_path / "ours").glob("**/*.kv"):
        path.unlink()
    assert not plugin.has(1)
    assert plugin.cpu.memory_allocator.memcheck() == free
    many = [plugin.fill(n) for n in range(20)]  # there is room for them still
    for each in many:
        each.ref_count_down()


def test_the_async_calls_stop_at_the_first_miss(plugin):
    plugin.put(0, 1, 3)
    keys, backend = [key(n) for n in range(4)], plugin.backend
    assert plugin.ask(backend.batched_async_contains("id", keys)) == 2
    found = plugin.ask(backend.batched_get_non_blocking("id", keys))
    assert [is_tensor(each, n) for n, each in enumerate(found)] == [True, True]


def test_loads_do_not_wait_for_stores(plugin, monkeypatch):
    plugin.put(0)
    disk_moves, write = threading.Event(), object_file.write

    def slow(*args: Any) -> None:
        disk_moves.wait(60.0)
        write(*args)

    monkeypatch.setattr(object_file, "write", slow)
    objects = [plugin.fill(number) for number in range(1, 9)]  # there are 4 threads
    keys = [key(number) for number in range(1, 9)]
    puts = plugin.backend.batched_submit_put_task(keys, objects)
    load = plugin.backend.batched_get_non_blocking("id", [key(0)])
    try:
        found = plugin.ask(load, patience_s=10.0)
    finally:
        disk_moves.set()
    assert is_tensor(found[0], 0)
    for future in puts:
        future.result(timeout=60.0)
    for each in [*objects, *found]:
        each.ref_count_down()


def test_wrong_settings_are_refused(tmp_path, loop, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)

    def build(config: LMCacheEngineConfig) -> None:
        TTLStoragePlugin("cpu", config, metadata(), None, loop).close()

    with pytest.raises(ConfigError, match="did you mean 'disk_ttl_s'"):
        build(engine_config(tmp_path, disk_ttl=1.0))
    config = engine_config(tmp_path)
    config.pre_caching_hash_algorithm = "builtin"
    with pytest.raises(ConfigError, match="sha256_cbor"):
        build(config)
