"""A pytest plugin (`-p`): LMCache's L2 adapters and disk backend are ours.

Tests import `MockL2Adapter`, `FSL2Adapter` and `LocalDiskBackend` by name, and servers
make the first two by the types "mock" and "fs" of `--l2-adapter`. Each is built from
LMCache's own configuration object. Which tests reached one of ours is reported.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import lmcache
import pytest
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters import fs_l2_adapter, mock_l2_adapter
from lmcache.v1.storage_backend import local_disk_backend

from bench.lmcache.upstream_tests.chosen import reason_not_to_run
from ttlcache_lmcache.adapters.l2_keys import encode_key
from ttlcache_lmcache.l2_adapter import TTLL2Adapter
from ttlcache_lmcache.storage_plugin import TTLStoragePlugin

#: The property of a test that used one of ours.
REACHED = "ttlcache_reached"
_MEMORY_BYTES = 64 << 20
_made = itertools.count()
_reached = 0


def _was_reached() -> None:
    global _reached
    _reached += 1


class AsMock(TTLL2Adapter):
    """In place of `MockL2Adapter`: it answers the mock's questions for tests."""

    def __init__(self, config: Any) -> None:
        _was_reached()
        size = int(config.max_size_gb * 2**30)
        super().__init__({"path": tempfile.mkdtemp(), "disk_bytes": size})

    def report_status(self) -> dict[str, Any]:
        own = {"stored_object_count": self.debug_get_stored_object_count()}
        return super().report_status() | own

    def debug_get_stored_object_count(self) -> int:
        return len(self._store.headers())

    def debug_get_locked_key_count(self) -> int:
        locked = self._store.status()["locked"]
        assert isinstance(locked, int)
        return locked

    def debug_has_key(self, key: ObjectKey) -> bool:
        return self._store.find(encode_key(key)) is not None


class AsFS(TTLL2Adapter):
    """In place of `FSL2Adapter`."""

    def __init__(self, config: Any) -> None:
        _was_reached()
        super().__init__(
            {
                "path": str(config.base_path),
                "disk_bytes": 1 << 40,
                "memory_bytes": _MEMORY_BYTES,
            }
        )


class AsLocalDisk(TTLStoragePlugin):
    """In place of `LocalDiskBackend`, in the folder that its configuration names."""

    def __init__(
        self,
        config: Any,
        loop: Any,
        local_cpu_backend: Any,
        dst_device: str = "cpu",
        *_: Any,
        **__: Any,
    ) -> None:
        _was_reached()
        name = f"storage_plugin.stand_in_{next(_made)}"
        path = Path(str(config.local_disk).removeprefix("file://"))
        config.pre_caching_hash_algorithm = "sha256_cbor"
        config.extra_config = {
            f"{name}.module_path": "ttlcache_lmcache.storage_plugin",
            f"{name}.class_name": "TTLStoragePlugin",
            f"{name}.path": str(path),
            f"{name}.disk_bytes": int(config.max_local_disk_size * 2**30),
        }
        super().__init__(dst_device, config, None, local_cpu_backend, loop)


mock_l2_adapter.MockL2Adapter = AsMock
fs_l2_adapter.FSL2Adapter = AsFS
local_disk_backend.LocalDiskBackend = AsLocalDisk
# Whole modules are skipped where LMCache sees no device, but need none.
lmcache.torch_dev.is_available = lambda: True
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        reason = reason_not_to_run(item.nodeid)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"cannot: {reason}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    before = _reached
    item.stash[_BEFORE] = before
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    number = _reached - item.stash[_BEFORE]
    item.user_properties.append((REACHED, number))
    return (yield)


_BEFORE = pytest.StashKey[int]()
