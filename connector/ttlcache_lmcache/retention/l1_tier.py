"""The server module's mind: programs, clients' TTLs, what leaves L1 for a store.

A turn begins with a lookup and ends with its session, or when the engine says that it
is over: an engine that keeps KV by itself may end sessions much later, and looks
nothing up that it still has.

No lmcache here; events come in, keys go out. Thread-safe: LMCache calls from its
request threads (some while it holds L1's lock), its event bus and its eviction loop.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

from sortedcontainers import SortedDict

from ttlcache.clock import Clock
from ttlcache.types import UNKNOWN_GAP
from ttlcache_lmcache.config import ServerModuleConfig
from ttlcache_lmcache.hints import Hint
from ttlcache_lmcache.retention.admission import Admission, AdmissionControl
from ttlcache_lmcache.retention.eviction_order import EvictionOrder
from ttlcache_lmcache.retention.program_table import ChainProgram
from ttlcache_lmcache.retention.residency import Chunk, ObjectKey, chunk_of
from ttlcache_lmcache.retention.return_estimator import ReturnEstimator

#: Share of L1 in use from which a store that fails is a matter of room, whatever
#: objects of this size are thought to fit.
FULL = 0.9
#: Requests remembered after their end, hints before it, and programs' names.
MEMORY = 8192
#: Of the requests that ended, so many are shown.
SHOWN = 32
#: Of all programs' contexts; more, and the longest silent are forgotten (1 GB).
MAX_CHUNKS = 2_000_000
#: Silent programs forgotten at a call: requests wait for it.
FORGOTTEN_AT_ONCE = 64

_Value = TypeVar("_Value")
_NOTHING_TOLD = Hint(request_id="-")


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
        self._config = config
        self._clock = clock
        self._usage = usage
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self._returns = ReturnEstimator()
        self._order = EvictionOrder(config.max_programs, self._returns)
        self._book, self._residency = self._order.book, self._order.residency
        self._admission = AdmissionControl(self._order, is_evictable)
        #: That came before the turn's end did, and when.
        self._hints: OrderedDict[str, tuple[Hint, float]] = OrderedDict()
        self._ended: OrderedDict[str, ChainProgram] = OrderedDict()
        self._named: OrderedDict[str, ChainProgram] = OrderedDict()
        self._deadlines: SortedDict[tuple[float, int], ChainProgram] = SortedDict()

    # the life of a turn

    def lookup(self, request_id: str, chain: Sequence[Chunk], tokens: int) -> None:
        """A request looks its prompt up: `chain` are its chunks, from the start."""
        now_s = self._clock.now_s()
        with self._lock:
            self._begin(now_s)
            program, goes_on = self._book.begin(request_id, chain, tokens, now_s)
            if goes_on:
                self.counts["turns_continued"] += 1
                self._returns.gap_ends(program, now_s)

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
        """The session of a request is over that looked something up."""
        now_s = self._clock.now_s()
        with self._lock:
            known = self._book.of_request(request_id)
            if known is not None:
                self._returns.observe_service(now_s - known.seen_s)
                self._book.rest(known, now_s)
                self._is_over(request_id, known, now_s)

    def stored(self, request_id: str, chain: Sequence[Chunk], tokens: int) -> None:
        """The session of a request is over that only stored; as for `lookup`."""
        now_s = self._clock.now_s()
        with self._lock:
            if not any(self._residency.has(chunk) for chunk in reversed(chain)):
                return
            for chunk in chain:
                self._residency.touch(chunk, now_s)
            known = self._ended.get(request_id)
            program = self._book.adopt(chain, tokens, known, now_s)
            if known is None and not program.is_running(now_s):
                self._is_over(request_id, program, now_s)

    def hint(self, hint: Hint) -> None:
        """What a client knows of a turn that ended or is about to."""
        now_s = self._clock.now_s()
        with self._lock:
            self.counts["hints"] += 1
            program = self._ended.get(hint.request_id)
            since_s = program.since_s if program is not None else now_s
            if program is None and hint.is_over:
                program = self._over_by_hint(hint, now_s)
            if program is None:
                _remember(self._hints, hint.request_id, (hint, now_s))
            elif not program.is_running(now_s):
                self._decide(program, hint, since_s)

    def _is_over(self, request_id: str, program: ChainProgram, now_s: float) -> None:
        _remember(self._ended, request_id, program)
        hint, heard_s = self._hints.pop(request_id, (_NOTHING_TOLD, now_s))
        self._decide(program, hint, heard_s if hint.is_over else now_s)

    def _over_by_hint(self, hint: Hint, now_s: float) -> ChainProgram | None:
        """Whose turn it was that the engine says is over; None: not known yet."""
        looked_up = self._book.of_request(hint.request_id)
        program = looked_up or self._named.get(hint.program or "")
        if program is not None:
            if looked_up or (program.chain and not program.is_running(now_s)):
                self._book.rest(program, now_s)
            _remember(self._ended, hint.request_id, program)
        return program

    def _decide(self, program: ChainProgram, hint: Hint, since_s: float) -> None:
        """A turn ended, or more is known of one that did."""
        self._book.changed[program] = None
        program.is_finished = hint.is_last_step
        program.is_told = False
        program.since_s = program.deadline_s = since_s
        if hint.program:
            _remember(self._named, hint.program, program)
        program.gap_key = hint.gap_key or UNKNOWN_GAP
        if program.is_finished:
            self.counts["programs_finished"] += 1
            self._returns.no_gap(program)
            return
        if program in self._book:
            self._returns.gap_begins(program, since_s)
        if hint.ttl_s is not None:
            program.is_told = True
            program.deadline_s = since_s + min(hint.ttl_s, self._config.max_ttl_s)
            self._deadlines[program.deadline_s, program.number] = program

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
            free = self._free_objects(used)
            if free is None:
                return Admission(list(keys), [])
            found = self._admission.decide(keys, free, now_s, may_refuse)
            self.counts["evicted"] += len(found.victims)
            self.counts["refused"] += len(keys) - len(found.keys)
            return found

    def more_room(
        self, keys: Sequence[ObjectKey], objects: int, may_refuse: bool
    ) -> list[ObjectKey]:
        """What leaves for `keys`, too: they found no room although it was counted.

        Nothing where L1 is emptier than `FULL` and they would fit: its memory is in
        pieces.

        Args:
            objects: how many, if so many are worth less.
            may_refuse: as for `admit`.
        """
        used, now_s = self._usage(), self._clock.now_s()
        with self._lock:
            free = self._free_objects(used)
            if free is None or (used < FULL and free >= len(keys)):
                return []
            self._begin(now_s)
            found = self._admission.victims(keys, objects, now_s, may_refuse)
            self.counts["evicted"] += len(found)
            return found

    def _free_objects(self, used: float) -> int | None:
        """For how many more there is room; None: not known yet.

        used: share of L1 in use.
        """
        objects = self._residency.num_objects
        if not objects or used <= 0.0:
            return None
        return max(int(objects / used + 1e-6) - objects, 0)

    # what is shown

    def status(self) -> dict[str, object]:
        """Plain numbers for `/status`, metrics and the RPC."""
        with self._lock:
            now_s = self._clock.now_s()
            self._begin(now_s)
            programs = self._book.programs()
            shown = {
                "l1_objects": self._residency.num_objects,
                "gaps_recorded": self._returns.gaps_recorded,
                "counts": dict(self.counts),
            }
        return {  # L1 waits for the lock: a reader counts without it
            "programs": len(programs),
            "programs_running": sum(each.is_running(now_s) for each in programs),
            "programs_in_ttl": sum(each.is_in_ttl(now_s) for each in programs),
            **shown,
        }

    def recent_turns(self) -> list[dict[str, object]]:
        """The turns that ended last and their deadlines, the youngest first."""
        with self._lock:
            now_s = self._clock.now_s()
            self._begin(now_s)
            ids = itertools.islice(reversed(self._ended), SHOWN)
            return [self._shown(request_id, now_s) for request_id in ids]

    def _shown(self, request_id: str, now_s: float) -> dict[str, object]:
        program = self._ended[request_id]
        return {
            "request_id": request_id,
            "ttl_s": round(program.deadline_s - program.since_s, 3),
            "left_s": round(program.deadline_s - now_s, 3),
            "is_told": program.is_told,
            "is_finished": program.is_finished,
            "is_kept": program.is_running(now_s) or program.is_in_ttl(now_s),
            "chunks": len(program.chain),
        }

    # time

    def _begin(self, now_s: float) -> None:
        """Before what depends on the time, or on how programs are ranked."""
        while self._deadlines and self._deadlines.peekitem(0)[0][0] <= now_s:
            (deadline_s, _), program = self._deadlines.popitem(0)
            if program.is_running(now_s) or program.deadline_s != deadline_s:
                continue  # it went on, or got another deadline
            if program.is_told and program.chain:
                self.counts["expired"] += 1
                self._book.changed[program] = None
        silent_s = now_s - self._config.program_idle_s
        for _ in range(FORGOTTEN_AT_ONCE):
            longest = self._book.longest_silent()
            has_room = self._book.num_chunks <= MAX_CHUNKS
            if longest is None or (longest.seen_s > silent_s and has_room):
                break
            self._book.forget(longest)
            self.counts["forgotten"] += 1
        self._order.look(now_s)


def _remember(memory: OrderedDict[str, _Value], key: str, value: _Value) -> None:
    memory[key] = value
    memory.move_to_end(key)
    while len(memory) > MEMORY:
        memory.popitem(last=False)
