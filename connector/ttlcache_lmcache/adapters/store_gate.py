"""Asks the tier at every write into L1: what may be stored, and what leaves for it.

LMCache has no plugin point for admission. Its storage manager's `reserve_write` may
return less than it was asked for (all its callers go on with what they got), so the
gate stands before it. LMCache allocates all objects of a store or none; the gate asks
for no more than fits. It counts objects, and these may be larger than those in L1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ttlcache_lmcache.retention.l1_tier import Tier

#: Halvings of a store that did not fit although room was made: something else took it,
#: or memory is in pieces.
_TRIES = 4
#: Times that more room is made before, twice as much each time: together enough for
#: objects 63 times as large as those that leave.
_ROOMS = 6


class StoreGate:
    """Before `reserve_write` of LMCache's storage manager and of its L1.

    Args:
        delete: deletes objects from L1; how many went.
        has_l2: whether what L1 stores goes on to L2: then nothing is refused.
    """

    def __init__(
        self,
        tier: Tier,
        delete: Callable[[list[Any]], int],
        has_l2: Callable[[], bool],
        on_error: Callable[[str, BaseException], None],
    ) -> None:
        self._tier = tier
        self._delete = delete
        self._has_l2 = has_l2
        self._on_error = on_error

    def store(
        self, keys: list[Any], reserve: Callable[[list[Any]], dict[Any, Any]]
    ) -> dict[Any, Any]:
        """Reserve memory for what is admitted of `keys`; `reserve` is LMCache's."""
        chosen = self._admitted(keys)
        if not chosen:
            return {}
        reserved = reserve(chosen)
        for doublings in range(_ROOMS):
            if reserved or self._tier.has_all(chosen):
                return reserved
            if not self._made_room(chosen, len(chosen) << doublings):
                break
            reserved = reserve(chosen)
        for _ in range(_TRIES if len(chosen) > 1 else 0):
            if reserved or self._tier.has_all(chosen):
                break
            chosen = chosen[: len(chosen) // 2]
            reserved = reserve(chosen) if chosen else {}
        return reserved

    def make_room(self, keys: list[Any]) -> None:
        """Before L1 reserves memory for `keys`, a load from L2 maybe."""
        if self._has_l2():
            self._admitted(keys)

    def _admitted(self, keys: list[Any]) -> list[Any]:
        try:
            found = self._tier.admit(keys, not self._has_l2())
            if found.victims:
                self._delete(found.victims)
        except Exception as error:  # noqa: BLE001 - LMCache must go on storing
            self._on_error("admission", error)
            return keys
        return found.keys

    def _made_room(self, keys: list[Any], objects: int) -> bool:
        try:
            may_refuse = not self._has_l2()
            found = self._tier.more_room(keys, objects, may_refuse)
            return bool(found) and self._delete(found) > 0
        except Exception as error:  # noqa: BLE001 - LMCache must go on storing
            self._on_error("admission", error)
            return False
