"""The gate before LMCache's own L1: what is loaded into a full one finds room."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="LMCache is an extra")

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.l1_manager import L1Manager

from ttlcache.clock import VirtualClock
from ttlcache_lmcache import compat
from ttlcache_lmcache.adapters.listeners import L1Events
from ttlcache_lmcache.adapters.store_gate import StoreGate
from ttlcache_lmcache.config import ServerModuleConfig, load
from ttlcache_lmcache.retention.l1_tier import Tier

OBJECT_BYTES, OBJECTS = 1 << 16, 16
LAYOUT = MemoryLayoutDesc([torch.Size([OBJECT_BYTES])], [torch.uint8])


@pytest.mark.parametrize("has_l2", [True, False])
def test_a_load_into_a_full_l1_finds_room(has_l2):
    size = OBJECT_BYTES * OBJECTS
    l1 = L1Manager(L1ManagerConfig(L1MemoryManagerConfig(size, use_lazy=False)))
    errors = []

    def used() -> float:
        held, total = l1.get_memory_usage()
        return float(held / total)

    def on_error(*error: Any) -> None:
        errors.append(error)

    config = load(ServerModuleConfig, {}, "test")
    tier = Tier(config, VirtualClock(), used, l1.is_key_evictable)
    l1.register_listener(L1Events(tier, on_error))
    controller = SimpleNamespace(
        _eviction_policy=None, _listener=SimpleNamespace(_policy=None)
    )
    storage = SimpleNamespace(
        _l1_managers_by_id={0: l1},
        _write_managers=(l1,),
        _eviction_controllers=[controller],
        reserve_write=lambda keys, layout_desc: {},
    )
    assert compat.only_l1(storage) is l1
    StoreGate(tier, l1.delete, lambda: has_l2, on_error).install(storage, l1)
    assert controller._eviction_policy.get_eviction_actions(1.0) == []

    def write(context: str, count: int) -> int:
        """How many objects found room, as a load from L2 asks for it."""
        hashes = [f"{context}-{number}".encode() for number in range(count)]
        keys = [ObjectKey(each, "m", 0) for each in hashes]
        tier.lookup(context, "m", hashes, count)
        found = l1.reserve_write(
            keys=keys, is_temporary=[False] * count, layout_desc=LAYOUT, tag="prefetch"
        )
        done = [key for key in keys if found[key][1] is not None]
        if done:
            l1.finish_write(done, tag="prefetch")
        tier.ended(context)
        return len(done)

    assert write("a", 8) == write("b", 8) == 8
    assert used() == 1.0
    assert write("c", 12) == (12 if has_l2 else 0)
    assert errors == []
    l1.close()
