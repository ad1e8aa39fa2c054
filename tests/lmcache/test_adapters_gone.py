"""Adapters of L2 that are taken away at run time, as LMCache's peers are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lmcache", reason="LMCache is an extra")

from tests.lmcache.test_tier import World
from ttlcache_lmcache.server_module import TTLServerModule


class Adapter:
    """Lists what it has."""

    def __init__(self, keys: list[Any]) -> None:
        self.keys = keys

    def list_l2_keys(self, page_size: int, cursor: str | None) -> Any:
        entries = [
            SimpleNamespace(key=SimpleNamespace(to_object_key=lambda k=key: k))
            for key in self.keys
        ]
        return SimpleNamespace(entries=entries, next_page_token=None)


class L1:
    def __init__(self) -> None:
        self.deleted: list[Any] = []

    def delete(self, keys: list[Any]) -> dict[Any, Any]:
        self.deleted += keys
        return {key: SimpleNamespace(name="SUCCESS") for key in keys}


def module_over(world: World, l1: L1, adapters: list[Any]) -> TTLServerModule:
    module = object.__new__(TTLServerModule)
    module.tier, module._l1s = world.tier, [l1]
    module._storage = SimpleNamespace(
        l2_adapters=lambda: [(None, adapter) for adapter in adapters]
    )
    module._read_l2()
    return module


def test_what_only_a_lost_adapter_had_stays_in_l1():
    world, l1 = World(), L1()
    gone, left = Adapter(world.keys("ab")), Adapter(world.keys("xy"))
    adapters = [gone, left]
    module = module_over(world, l1, adapters)
    world.turn("1", "ab", in_l2=False)
    world.turn("2", "xy", in_l2=False)
    adapters.remove(gone)
    world.clock.advance(20.0)  # both are expired
    module.sweep()
    assert set(l1.deleted) == set(world.keys("xy"))
    adapters.append(gone)  # it is back, and is heard of
    world.tier.stored_in_l2(gone.keys)
    module.sweep()
    assert set(l1.deleted) == {*world.keys("xy"), *world.keys("ab")}


def test_one_that_came_later_may_go_too():
    world, l1, adapters = World(), L1(), []
    module = module_over(world, l1, adapters)
    adapters.append(Adapter([]))
    module.sweep()
    world.turn("1", "ab")  # and down there
    adapters.clear()
    world.clock.advance(20.0)
    module.sweep()
    assert l1.deleted == []
