"""Which of the objects that are to be stored get a place in L1, and whose.

Room is made at the moment of the store, from what is worth less than the program that
stores; what is worth no more than anything in L1 is refused. So L1 may be full to the
last byte, and contexts that take turns do not push each other out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ttlcache_lmcache.order import leaving, queue
from ttlcache_lmcache.programs import ChainProgram, Chunk, ProgramBook
from ttlcache_lmcache.ranks import Rank, Ranking
from ttlcache_lmcache.residency import ObjectKey, Residency, chunk_of

#: Seconds for which an order is good: putting all programs in order costs more than a
#: store may take every time.
ORDER_AGE_S = 0.25

IsEligible = Callable[[ObjectKey], bool]


class Admission(NamedTuple):
    """keys: what may be stored, in the order given. victims: what leaves for it."""

    keys: list[ObjectKey]
    victims: list[ObjectKey]


class _Order:
    """The chunks that go first, as they stood at one moment."""

    def __init__(
        self,
        chunks: Iterator[tuple[Rank, ChainProgram | None, Chunk]],
        ranking: Ranking,
        at_s: float,
    ) -> None:
        self._chunks = chunks
        self._ranking = ranking
        self._at_s = at_s
        self.next = next(chunks, None)

    def is_good(self, ranking: Ranking, now_s: float) -> bool:
        return ranking is self._ranking and now_s - self._at_s <= ORDER_AGE_S

    def take(self) -> None:
        self.next = next(self._chunks, None)


class Admissions:
    """See the module's docstring. Not thread-safe: the tier locks."""

    def __init__(self, book: ProgramBook, residency: Residency) -> None:
        self._book = book
        self._residency = residency
        self._order: _Order | None = None

    def decide(
        self,
        keys: Sequence[ObjectKey],
        free: int,
        rank: Ranking,
        now_s: float,
        may_refuse: bool,
        is_eligible: IsEligible,
    ) -> Admission:
        """Where `free` more objects fit into L1."""
        new = {key for key in keys if not self._residency.has_object(key)}
        if len(new) <= free:
            return Admission(list(keys), [])
        owner = self._owner(keys)
        refused = self._refused(keys, owner) if owner and may_refuse else set()
        new -= refused
        victims = self._make_room(
            len(new) - free, owner, rank, now_s, may_refuse, is_eligible
        )
        lack = len(new) - free - len(victims)
        if lack > 0:
            # The tail is refused: a prefix is of use without it.
            late = [key for key in keys if key in new][-lack:]
            refused.update(late)
            if owner and may_refuse:
                self._remember(owner, late[0])
        return Admission([key for key in keys if key not in refused], victims)

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
        rank: Ranking,
        now_s: float,
        may_refuse: bool,
        is_eligible: IsEligible,
    ) -> list[ObjectKey]:
        """Objects that may go; fewer than `lack` where nobody is worth less."""
        limit = rank(owner, now_s) if owner and may_refuse else None
        victims = [key for key in self._residency.reserved() if is_eligible(key)]
        is_anew = self._order is None or not self._order.is_good(rank, now_s)
        while len(victims) < lack:
            if is_anew:
                entries = queue(self._book, self._residency, rank, now_s)
                self._order = _Order(leaving(entries, self._book), rank, now_s)
            order = self._order
            assert order is not None
            is_anybodys = owner is None and may_refuse
            self._take(order, victims, lack, owner, limit, is_anybodys, is_eligible)
            if is_anew or order.next is not None:
                break
            is_anew = True  # the old order is used up: what has come since?
        return victims

    def _take(
        self,
        order: _Order,
        victims: list[ObjectKey],
        lack: int,
        owner: ChainProgram | None,
        limit: Rank | None,
        is_anybodys: bool,
        is_eligible: IsEligible,
    ) -> None:
        while order.next is not None and len(victims) < lack:
            rank, program, chunk = order.next
            if limit is not None and (rank >= limit or program is owner):
                return
            if is_anybodys and any(p.running for p in self._book.holders(chunk)):
                return  # maybe just the request that stores: its prefix is wanted
            order.take()
            if owner is not None and self._book.holds(owner, chunk):
                continue  # its own prefix is worth more than its tail
            objects = self._residency.objects(chunk)
            victims += [key for key in objects if is_eligible(key)]
