"""The server module's mind: programs, clients' TTLs, what leaves L1 for a store.

No lmcache here; events come in, keys go out. Thread-safe: LMCache calls from its
request threads (some while it holds L1's lock), its event bus and its eviction loop.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

from ttlcache.clock import Clock
from ttlcache_lmcache.config import ServerModuleConfig
from ttlcache_lmcache.hints import Hint
from ttlcache_lmcache.retention.admission import Admission, AdmissionControl
from ttlcache_lmcache.retention.eviction_order import EvictionOrder
from ttlcache_lmcache.retention.program_table import Chunk
from ttlcache_lmcache.retention.residency import ObjectKey, chunk_of, space_of
from ttlcache_lmcache.retention.return_estimator import ReturnEstimator
from ttlcache_lmcache.retention.turn_lifecycle import TurnLifecycle

#: Share of L1 in use from which a store that fails is a matter of room.
FULL = 0.9


class Tier:
    """See the module's docstring. Every public method takes the lock.

    Args:
        usage: reads how much of L1 is used, from 0 to 1; called without our lock.
        is_evictable: whether L1 may delete an object now; called with our lock.
    """

    def __init__(
        self,
        config: ServerModuleConfig,
        clock: Clock,
        usage: Callable[[], float],
        is_evictable: Callable[[ObjectKey], bool],
    ) -> None:
        self._clock = clock
        self._usage = usage
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self._returns = ReturnEstimator(config.program_idle_s)
        self._order = EvictionOrder(config.max_programs, self._returns)
        self._book, self._residency = self._order.book, self._order.residency
        self._turns = TurnLifecycle(config, self._book, self._returns, self.counts)
        self._admission = AdmissionControl(self._order, is_evictable)

    # the life of a turn

    def lookup(
        self,
        request_id: str,
        model: str,
        hashes: Sequence[bytes],
        tokens: int,
        salt: str = "",
    ) -> None:
        """A request looks its prompt up: `hashes` are its chunks, from the start."""
        chain = _chain(model, salt, hashes)
        now_s = self._clock.now_s()
        with self._lock:
            self._begin(now_s)
            self._turns.lookup(request_id, chain, tokens, now_s)

    def context(self, keys: Sequence[ObjectKey]) -> None:
        """Objects were used: a hit, or all of a request that ended."""
        now_s = self._clock.now_s()
        with self._lock:
            # One context per space; workers and layer groups repeat its chunks.
            chains: dict[str, dict[Chunk, None]] = {}
            for chunk in map(chunk_of, keys):
                chains.setdefault(chunk[0], {})[chunk] = None
            for chain in chains.values():
                for chunk in chain:
                    self._residency.touch(chunk, now_s)
                self._book.extend(list(chain))

    def ended(self, request_id: str) -> None:
        """A request is over."""
        now_s = self._clock.now_s()
        with self._lock:
            self._turns.ended(request_id, now_s)

    def stored(
        self,
        request_id: str,
        model: str,
        hashes: Sequence[bytes],
        tokens: int,
        salt: str = "",
    ) -> None:
        """A request is over that looked nothing up; its chunks, from the start."""
        chain, now_s = _chain(model, salt, hashes), self._clock.now_s()
        with self._lock:
            if not any(self._residency.has(chunk) for chunk in reversed(chain)):
                return
            for chunk in chain:
                self._residency.touch(chunk, now_s)
            self._turns.stored(request_id, chain, tokens, now_s)

    def hint(self, hint: Hint) -> None:
        """What a client knows of a turn that ended or is about to."""
        now_s = self._clock.now_s()
        with self._lock:
            self._turns.hint(hint, now_s)

    # what L1 has

    def reserved(self, keys: Sequence[ObjectKey]) -> None:
        with self._lock:
            self._residency.reserve(keys)

    def has_all(self, keys: Sequence[ObjectKey]) -> bool:
        """Whether L1 has all of these, or somebody is writing them."""
        with self._lock:
            return all(self._residency.has_object(key) for key in keys)

    def written(self, keys: Sequence[ObjectKey]) -> None:
        now_s = self._clock.now_s()
        with self._lock:
            self._order.written(keys, now_s)

    def deleted(self, keys: Sequence[ObjectKey]) -> None:
        with self._lock:
            self._residency.delete(keys)

    # what leaves

    def admit(self, keys: Sequence[ObjectKey], may_refuse: bool) -> Admission:
        """Which of `keys` may be stored now, and what has to leave for them.

        Args:
            may_refuse: False where what L1 does not take is lost for L2, too.
        """
        used, now_s = self._usage(), self._clock.now_s()
        with self._lock:
            self._begin(now_s)
            objects = self._residency.num_objects
            if not objects or used <= 0.0:
                return Admission(list(keys), [])  # nobody knows yet what fits
            free = max(int(objects / used + 1e-6) - objects, 0)
            found = self._admission.decide(keys, free, now_s, may_refuse)
            self.counts["evicted"] += len(found.victims)
            self.counts["refused"] += len(keys) - len(found.keys)
            return found

    def more_room(
        self, keys: Sequence[ObjectKey], objects: int, may_refuse: bool
    ) -> list[ObjectKey]:
        """What leaves for `keys`, too: they found no room although it was counted.

        Nothing while L1 is emptier than `FULL`: its memory is in pieces.

        Args:
            objects: how many, if so many are worth less.
            may_refuse: as for `admit`.
        """
        used, now_s = self._usage(), self._clock.now_s()
        if used < FULL:
            return []
        with self._lock:
            self._begin(now_s)
            found = self._admission.victims(keys, objects, now_s, may_refuse)
            self.counts["evicted"] += len(found)
            return found

    # what is shown

    def status(self) -> dict[str, object]:
        """Plain numbers for `/status`, metrics and the RPC."""
        with self._lock:
            now_s = self._clock.now_s()
            self._begin(now_s)
            programs = self._book.programs()
            return {
                "programs": len(programs),
                "programs_running": sum(each.is_running(now_s) for each in programs),
                "programs_in_ttl": sum(each.is_in_ttl(now_s) for each in programs),
                "l1_objects": self._residency.num_objects,
                "gaps_recorded": self._returns.gaps_recorded,
                "counts": dict(self.counts),
            }

    def recent_turns(self) -> list[dict[str, object]]:
        """The turns that ended last and their deadlines, the youngest first."""
        with self._lock:
            now_s = self._clock.now_s()
            self._begin(now_s)
            return self._turns.recent(now_s)

    def _begin(self, now_s: float) -> None:
        """Before what depends on the time, or on how programs are ranked."""
        self._turns.pass_time(now_s)
        self._order.look(now_s)


def _chain(model: str, salt: str, hashes: Sequence[bytes]) -> list[Chunk]:
    space = space_of(model, salt)
    return [(space, bytes(each)) for each in hashes]
