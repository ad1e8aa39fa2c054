"""Which of the objects that are to be stored get a place in L1, and whose.

Room is made at the moment of the store, from what is worth less than the program that
stores; what is worth no more than anything in L1 is refused. So L1 may be full to the
last byte, and contexts that take turns do not push each other out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ttlcache_lmcache.retention.eviction_order import EvictionOrder
from ttlcache_lmcache.retention.program_table import ChainProgram
from ttlcache_lmcache.retention.residency import ObjectKey, chunk_of

#: Seconds for which what was named to one store is not named to another: whoever stores
#: deletes it next, or it was in use by then.
_NAMED_S = 0.25


class Admission(NamedTuple):
    """keys: what may be stored, in the order given. victims: what leaves for it."""

    keys: list[ObjectKey]
    victims: list[ObjectKey]


class AdmissionControl:
    """See the module's docstring. Not thread-safe: the tier locks.

    Args:
        is_evictable: whether L1 may delete an object now.
    """

    def __init__(
        self, order: EvictionOrder, is_evictable: Callable[[ObjectKey], bool]
    ) -> None:
        self._order = order
        self._is_evictable = is_evictable
        self._book, self._residency = order.book, order.residency
        self._named_s: dict[ObjectKey, float] = {}  # the first to be named first

    def deleted(self, keys: Sequence[ObjectKey]) -> None:
        for key in keys:
            self._named_s.pop(key, None)

    def decide(
        self,
        keys: Sequence[ObjectKey],
        free: int,
        now_s: float,
        may_refuse: bool,
    ) -> Admission:
        """Where `free` more objects fit into L1."""
        self._order.look(now_s)
        new = {key for key in keys if not self._residency.has_object(key)}
        if len(new) <= free:
            return Admission(list(keys), [])
        owner = self._owner(keys)
        refused = self._refused(keys, owner) if owner and may_refuse else set()
        new -= refused
        victims = self._make_room(len(new) - free, owner, now_s, may_refuse)
        lack = len(new) - free - len(victims)
        if lack > 0:
            # The tail is refused: a prefix is of use without it.
            late = [key for key in keys if key in new][-lack:]
            refused.update(late)
            if owner and may_refuse:
                self._remember(owner, late[0])
        return Admission([key for key in keys if key not in refused], victims)

    def more_room(
        self,
        keys: Sequence[ObjectKey],
        objects: int,
        now_s: float,
        may_refuse: bool,
    ) -> list[ObjectKey]:
        """Up to so many objects that may go for `keys`."""
        self._order.look(now_s)
        owner = self._owner(keys)
        return self._make_room(objects, owner, now_s, may_refuse)

    def _owner(self, keys: Sequence[ObjectKey]) -> ChainProgram | None:
        """Whose request it is that stores; None: what it generated, or unknown."""
        for key in reversed(keys):
            holders = self._book.holders(chunk_of(key))
            running = [each for each in holders if each.running]
            if running:
                return max(running, key=lambda each: each.seen_s)
        return None

    def _refused(
        self, keys: Sequence[ObjectKey], owner: ChainProgram
    ) -> set[ObjectKey]:
        """What lies behind a chunk that this turn was refused already.

        Of no use without that chunk. Workers store one after the other, and are to
        hear the same.
        """
        if owner.refused_from is None:
            return set()
        behind = set(owner.chain[owner.refused_from :])
        known = behind.union(owner.chain[: owner.refused_from])
        return {
            key
            for key in keys
            if (chunk_of(key) in behind or chunk_of(key) not in known)
            and not self._residency.has(chunk_of(key))
        }

    def _remember(self, owner: ChainProgram, key: ObjectKey) -> None:
        chunk = chunk_of(key)
        depth = len(owner.chain)
        if chunk in owner.chain:
            depth = owner.chain.index(chunk)
        before = owner.refused_from
        owner.refused_from = depth if before is None else min(depth, before)

    def _make_room(
        self,
        lack: int,
        owner: ChainProgram | None,
        now_s: float,
        may_refuse: bool,
    ) -> list[ObjectKey]:
        """Objects that may go; fewer than `lack` where nobody is worth less."""
        self._forget_named(now_s)
        victims = [key for key in self._residency.reserved() if self._is_evictable(key)]
        limit = self._order.rank(owner, now_s) if owner and may_refuse else None
        is_anybodys = owner is None and may_refuse
        for rank, program, chunk in self._order.chunks(now_s):
            if len(victims) >= lack:
                break
            if limit is not None and (rank >= limit or program is owner):
                break
            if is_anybodys and any(p.running for p in self._book.holders(chunk)):
                break  # maybe just the request that stores: its prefix is wanted
            if owner is not None and owner in self._book.holders(chunk):
                continue  # its own prefix is worth more than its tail
            objects = self._residency.objects(chunk)
            found = [
                k for k in objects if k not in self._named_s and self._is_evictable(k)
            ]
            self._named_s.update(dict.fromkeys(found, now_s))
            victims += found
        return victims

    def _forget_named(self, now_s: float) -> None:
        while self._named_s:
            key, at_s = next(iter(self._named_s.items()))
            if now_s - at_s <= _NAMED_S:
                break
            del self._named_s[key]
