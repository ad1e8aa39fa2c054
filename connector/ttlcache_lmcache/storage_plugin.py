"""The CPU and disk tier of LMCache's in-process mode, in place of LMCache's own.

    storage_plugins: ["ttlcache"]
    local_cpu: false
    pre_caching_hash_algorithm: sha256_cbor
    extra_config:
      storage_plugin.ttlcache.module_path: ttlcache_lmcache.storage_plugin
      storage_plugin.ttlcache.class_name: TTLStoragePlugin
      storage_plugin.ttlcache.path: /nvme/kv
      storage_plugin.ttlcache.disk_bytes: 500000000000
      storage_plugin.ttlcache.memory_bytes: 50000000000

LMCache calls that mode deprecated. With `local_cpu: true` LMCache keeps its own CPU
tier before this one, which then serves only what that one lost.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.storage_backend.abstract_backend import StoragePluginInterface

from ttlcache.clock import default_clock
from ttlcache.errors import ConfigError
from ttlcache_lmcache import compat
from ttlcache_lmcache.config import TierConfig, load
from ttlcache_lmcache.store.object_file import Header
from ttlcache_lmcache.store.store import StoreThreads, TieredStore

#: What LMCache itself reads under a plugin's prefix.
_LMCACHES_OWN = ("module_path", "class_name")
_CLASS = "ttlcache_lmcache.storage_plugin"
_OnStored = Callable[[CacheEngineKey], None]


def settings_of(config: Any) -> tuple[str, dict[str, Any]]:
    """The prefix under which LMCache's configuration has this plugin, and its settings.

    Raises:
        ConfigError: it is configured under no name, or under several, or with the
            default hash: other processes have other keys.
    """
    extra = config.extra_config or {}
    ending = ".module_path"
    names = [k[: -len(ending)] for k, v in extra.items() if v == _CLASS]
    names = [name for name in names if name.startswith("storage_plugin.")]
    if len(names) != 1:
        raise ConfigError(
            f"extra_config has {len(names)} keys 'storage_plugin.NAME.module_path' "
            f"with value {_CLASS!r}, expected: 1"
        )
    is_seeded = os.environ.get("PYTHONHASHSEED", "random") != "random"
    if config.pre_caching_hash_algorithm == "builtin" and not is_seeded:
        raise ConfigError(
            "key 'pre_caching_hash_algorithm' has value 'builtin', expected: "
            "'sha256_cbor' (Python's own hash differs in every process, so nothing on "
            "disk would ever be found again)"
        )
    prefix = names[0] + "."
    found = {k[len(prefix) :]: v for k, v in extra.items() if k.startswith(prefix)}
    return names[0], {k: v for k, v in found.items() if k not in _LMCACHES_OWN}


class TTLStoragePlugin(StoragePluginInterface):
    """LMCache's side of `TieredStore`, one per worker, each in a folder of its own.

    Raises:
        ConfigError: wrong settings, a folder that cannot be used, or a hash under
            which nothing is found again.
        UnsupportedEngineError: an LMCache that was not tested.
    """

    def __init__(
        self,
        dst_device: str,
        config: Any = None,
        metadata: Any = None,
        local_cpu_backend: Any = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(dst_device, config, metadata, local_cpu_backend, loop)
        name, raw = settings_of(config)
        worker = int(getattr(metadata, "worker_id", 0) or 0)
        if "path" in raw:  # every worker its own
            raw["path"] = f"{raw['path']}/worker-{worker}"
        settings = load(TierConfig, raw, f"extra_config {name}")
        compat.check_lmcache(allow_untested=settings.allow_untested_lmcache)
        self._cpu = local_cpu_backend
        self._logger = compat.logger(__name__)
        self._store = TieredStore(settings, default_clock(), logger=self._logger)
        self._lock = threading.Lock()
        self._putting: set[CacheEngineKey] = set()
        self._threads = StoreThreads(
            self._store, "storage", settings.num_threads, self._logger
        )

    def __str__(self) -> str:
        return "TTLStoragePlugin"

    # store

    def exists_in_put_tasks(self, key: CacheEngineKey) -> bool:
        with self._lock:
            return key in self._putting

    def batched_submit_put_task(
        self,
        keys: Sequence[CacheEngineKey],
        objs: list[MemoryObj],
        transfer_spec: Any = None,
        on_complete_callback: _OnStored | None = None,
    ) -> list[Future[None]]:
        futures = []
        for key, each in zip(keys, objs, strict=True):
            with self._lock:
                if key in self._putting:
                    continue
                self._putting.add(key)
            each.ref_count_up()
            futures.append(
                self._threads.puts.submit(self._put, key, each, on_complete_callback)
            )
        return futures

    def _put(
        self, key: CacheEngineKey, each: MemoryObj, on_stored: _OnStored | None
    ) -> None:
        try:
            kept = self._store.put(_encode(key), each.byte_array, _meta_of(each))
        finally:
            each.ref_count_down()
            with self._lock:
                self._putting.discard(key)
        if kept and on_stored is not None:
            try:
                on_stored(key)
            except Exception:
                self._logger.exception("ttlcache: LMCache's callback failed")

    # lookup

    def contains(self, key: CacheEngineKey, pin: bool = False) -> bool:
        if pin:
            return self.pin(key)
        return self._store.find(_encode(key)) is not None

    def pin(self, key: CacheEngineKey) -> bool:
        return self._store.lock([_encode(key)])[0]

    def unpin(self, key: CacheEngineKey) -> bool:
        self._store.unlock([_encode(key)])
        return True

    async def batched_async_contains(
        self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False
    ) -> int:
        found: int = self.batched_contains(keys, pin)
        return found

    # load

    def get_blocking(self, key: CacheEngineKey) -> MemoryObj | None:
        raw = _encode(key)
        header = self._store.find(raw)
        if header is None:
            return None
        each = self._allocate(header)
        if each is None:
            return None
        kept = False
        try:
            kept = self._store.read_into(raw, memoryview(each.byte_array))
        finally:
            if not kept:
                each.ref_count_down()
        return each if kept else None

    def _allocate(self, header: Header) -> MemoryObj | None:
        meta = json.loads(header.meta)
        shapes = [torch.Size(shape) for shape in meta["shapes"]]
        dtypes = [getattr(torch, name) for name in meta["dtypes"]]
        # Waiting for room could wait for ever: everything may be pinned.
        return self._cpu.allocate(
            shapes, dtypes, MemoryFormat[meta["format"]], busy_loop=False
        )

    async def batched_get_non_blocking(
        self,
        lookup_id: str,
        keys: list[CacheEngineKey],
        transfer_spec: Any = None,
    ) -> list[MemoryObj]:
        """The objects up to the first miss."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads.gets, self._get_prefix, keys)

    def _get_prefix(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj]:
        found = []
        for key in keys:
            each = self.get_blocking(key)
            if each is None:
                break
            found.append(each)
        return found

    # management

    def remove(self, key: CacheEngineKey, force: bool = True) -> bool:
        return bool(self._store.delete([_encode(key)]))

    def clear(self) -> int:
        """Remove all that is not pinned; how many."""
        return len(self._store.delete([h.key for h in self._store.headers()]))

    def touch_cache(self) -> None:
        return  # every use renews already

    def get_allocator_backend(self) -> Any:
        return self._cpu

    def status(self) -> dict[str, object]:
        return self._store.status()

    def close(self) -> None:
        self._threads.close()


def _encode(key: CacheEngineKey) -> bytes:
    text: str = key.to_string()
    return text.encode()


def _meta_of(each: MemoryObj) -> bytes:
    meta = {
        "shapes": [list(shape) for shape in each.get_shapes()],
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in each.get_dtypes()],
        "format": each.get_memory_format().name,
    }
    return json.dumps(meta).encode()
