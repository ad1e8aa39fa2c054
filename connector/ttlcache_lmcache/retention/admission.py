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


class Admission(NamedTuple):
    """keys: what may be stored, in the order given. victims: what leaves for it."""

    keys: list[ObjectKey]
    victims: list[ObjectKey]


class AdmissionControl:
    """See the module's docstring. Not thread-safe.

    Args:
        is_evictable: whether L1 may delete an object now.
    """

    def __init__(
        self, order: EvictionOrder, is_evictable: Callable[[ObjectKey], bool]
    ) -> None:
        self._order = order
        self._is_evictable = is_evictable
        self._book, self._residency = order.book, order.residency

    def decide(
        self, keys: Sequence[ObjectKey], free: int, now_s: float, may_refuse: bool
    ) -> Admission:
        """Where `free` more objects fit into L1."""
        new = [key for key in keys if not self._residency.has_object(key)]
        if len(new) <= free:
            return Admission(list(keys), [])
        owner = self._owner(keys, now_s)
        refused = set()
        if owner is not None and may_refuse:
            refused = self._behind_a_hole(new, owner)
            new = [key for key in new if key not in refused]
        victims = self.victims(keys, len(new) - free, now_s, may_refuse)
        fit = max(free + len(victims), 0)
        refused.update(new[fit:])  # the tail: a prefix is of use without it
        return Admission([key for key in keys if key not in refused], victims)

    def _owner(self, keys: Sequence[ObjectKey], now_s: float) -> ChainProgram | None:
        """Whose request it is that stores; None: what it generated, or unknown."""
        for key in reversed(keys):
            holders = self._book.holders(chunk_of(key))
            running = [each for each in holders if each.is_running(now_s)]
            if running:
                return max(running, key=lambda each: each.seen_s)
        return None

    def _behind_a_hole(
        self, new: Sequence[ObjectKey], owner: ChainProgram
    ) -> set[ObjectKey]:
        """What lies behind a chunk that this turn was refused: of no use without it."""
        coming = {chunk_of(key) for key in (*new, *self._residency.reserved())}
        whole = set()
        for chunk in owner.chain:
            if chunk not in coming and not self._residency.has(chunk):
                return {key for key in new if chunk_of(key) not in whole}
            whole.add(chunk)
        return set()

    def victims(
        self, keys: Sequence[ObjectKey], lack: int, now_s: float, may_refuse: bool
    ) -> list[ObjectKey]:
        """Objects that may go for `keys`; fewer than `lack` where nobody is worth
        less."""
        owner = self._owner(keys, now_s)
        found = [key for key in self._residency.reserved() if self._is_evictable(key)]
        limit = self._order.rank(owner, now_s) if owner and may_refuse else None
        is_anybodys = owner is None and may_refuse
        for rank, program, chunk in self._order.chunks(now_s):
            if len(found) >= lack:
                break
            if limit is not None and (rank >= limit or program is owner):
                break
            holders = self._book.holders(chunk)
            if is_anybodys and any(each.is_running(now_s) for each in holders):
                break  # maybe just the request that stores: its prefix is wanted
            if owner is not None and owner in holders:
                continue  # its own prefix is worth more than its tail
            objects = self._residency.objects(chunk)
            found += [key for key in objects if self._is_evictable(key)]
        return found
