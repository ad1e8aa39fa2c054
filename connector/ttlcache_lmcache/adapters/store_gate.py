"""Asks the tier at every write into L1: what may be stored, and what leaves for it.

LMCache has no plugin point for admission. Its storage manager's `reserve_write` may
return less than it was asked for (all its callers go on with what they got), so the
gate stands before it. LMCache allocates all objects of a store or none; the gate asks
for no more than fits. It counts objects, and these may be larger than those in L1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lmcache.v1.distributed.error import L1Error
from lmcache.v1.distributed.eviction_policy import NoOpEvictionPolicy

from ttlcache_lmcache import internals
from ttlcache_lmcache.retention.l1_tier import Tier

#: Times that more room is made for a store that does not fit, twice as much each time:
#: together enough for objects 63 times as large as those that leave.
_ROOMS = 6


class StoreGate:
    """Before `reserve_write` of LMCache's storage manager and of its L1.

    Args:
        delete: deletes objects from L1, those that another store deletes, too.
        has_l2: whether what L1 stores goes on to L2: then nothing is refused.
    """

    def __init__(
        self,
        tier: Tier,
        delete: Callable[[list[Any]], object],
        has_l2: Callable[[], bool],
        on_error: Callable[[str, BaseException], None],
    ) -> None:
        self._tier = tier
        self._delete = delete
        self._has_l2 = has_l2
        self._on_error = on_error
        self._give_back: Callable[[], None] = lambda: None

    def install(self, storage_manager: Any, l1: Any) -> None:
        """Stand there, and let LMCache evict nothing by itself, until a fault of ours.

        LMCache 0.5 has a closed list of eviction policies. The server serves nobody yet
        when its modules are built.
        """
        reserve, reserve_in_l1 = storage_manager.reserve_write, l1.reserve_write

        def reserve_with_room(
            keys: list[Any], is_temporary: list[bool], *args: Any, **more: Any
        ) -> Any:
            temporary = dict(zip(keys, is_temporary, strict=True))

            def reserve_some(some: list[Any]) -> dict[Any, Any]:
                each = [temporary[key] for key in some]
                found: dict[Any, Any] = reserve_in_l1(some, each, *args, **more)
                return found

            return self.with_room(keys, reserve_some)

        def reserve_admitted(keys: list[Any], layout_desc: Any) -> Any:
            return self.store(keys, lambda chosen: reserve(chosen, layout_desc))

        l1.reserve_write = reserve_with_room
        storage_manager.reserve_write = reserve_admitted
        self._give_back = internals.replace_eviction_policy(
            storage_manager, NoOpEvictionPolicy()
        )

    def store(
        self, keys: list[Any], reserve: Callable[[list[Any]], dict[Any, Any]]
    ) -> dict[Any, Any]:
        """Reserve memory for what is admitted of `keys`; `reserve` is LMCache's."""
        chosen = self._admitted(keys)
        reserved = reserve(chosen) if chosen else {}
        # Something else took the room, or memory is in pieces.
        while not reserved and len(chosen) > 1 and not self._tier.has_all(chosen):
            chosen = chosen[: len(chosen) // 2]
            reserved = reserve(chosen)
        return reserved

    def with_room(
        self, keys: list[Any], reserve: Callable[[list[Any]], dict[Any, Any]]
    ) -> dict[Any, Any]:
        """Reserve in L1, as often as more leaves for what finds no memory.

        Stores come here, and loads from L2.
        """
        found = reserve(keys)
        for doublings in range(_ROOMS):
            short = [k for k in keys if found[k][0] == L1Error.OUT_OF_MEMORY]
            if not short or not self._made_room(short, len(short) << doublings):
                break
            found |= reserve(short)
        return found

    def _admitted(self, keys: list[Any]) -> list[Any]:
        try:
            found = self._tier.admit(keys, not self._has_l2())
            self._delete(found.victims)
        except Exception as error:  # noqa: BLE001 - LMCache must go on storing
            self._give_back()
            self._on_error("admission", error)
            return keys
        return found.keys

    def _made_room(self, keys: list[Any], objects: int) -> bool:
        try:
            found = self._tier.more_room(keys, objects, not self._has_l2())
            self._delete(found)
        except Exception as error:  # noqa: BLE001 - LMCache must go on storing
            self._give_back()
            self._on_error("admission", error)
            return False
        return bool(found)
