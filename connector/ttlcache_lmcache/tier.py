"""The server module's mind: programs, deadlines, what leaves L1 and when.

No lmcache here; events come in, keys go out. Thread-safe: LMCache calls from its
request threads (some while it holds L1's lock), its event bus and its eviction loop.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

from ttlcache import policies
from ttlcache.clock import Clock
from ttlcache.gaps import GapHistory
from ttlcache.policies.base import View
from ttlcache.types import Decision, GapKey, TurnFacts
from ttlcache_lmcache.config import ServerModuleConfig
from ttlcache_lmcache.costs import TierCosts
from ttlcache_lmcache.headroom import Headroom
from ttlcache_lmcache.hints import Hint
from ttlcache_lmcache.order import chunks_to_evict, is_protected
from ttlcache_lmcache.programs import FINAL_GAP, ChainProgram, Chunk, ProgramBook
from ttlcache_lmcache.residency import ObjectKey, Residency, chunk_of

#: Requests remembered after their end, and hints before it.
MEMORY = 8192


class Tier:
    """See the module's docstring. Every public method takes the lock.

    Args:
        usage: reads how much of L1 is used, from 0 to 1; called without our lock.
    """

    def __init__(
        self,
        config: ServerModuleConfig,
        clock: Clock,
        usage: Callable[[], float],
        costs: TierCosts | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._usage = usage
        self._policy = policies.create(config.policy, config.policy_options)
        self._gaps = GapHistory(horizon_s=config.program_idle_s)
        self._costs = costs if costs is not None else TierCosts()
        self._book = ProgramBook(config.max_programs)
        self._residency = Residency()
        self._headroom = Headroom()
        self._hints: OrderedDict[str, Hint] = OrderedDict()
        self._ended: OrderedDict[str, ChainProgram] = OrderedDict()
        self._deadlines: list[tuple[float, int, ChainProgram]] = []
        self._order = itertools.count()  # of equal deadlines
        self._leaving: dict[ChainProgram, None] = {}
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()

    # the life of a turn

    def lookup(
        self, request_id: str, model: str, hashes: Sequence[bytes], tokens: int
    ) -> None:
        """A request looks its prompt up: `hashes` are its chunks, from the start."""
        chain = [(model, bytes(each)) for each in hashes]
        now_s = self._clock.now_s()
        with self._lock:
            program, goes_on = self._book.begin(request_id, chain, tokens, now_s)
            self._leaving.pop(program, None)
            if goes_on:
                self.counts["turns_continued"] += 1
                gap_s = self._gaps.finish(program.number, now_s)
                if gap_s is not None:
                    self._learn(program, gap_s)

    def context(self, keys: Sequence[ObjectKey]) -> None:
        """Objects were used: a hit, or all of a request that ended."""
        now_s = self._clock.now_s()
        with self._lock:
            # One context per model; workers and layer groups repeat its chunks.
            chains: dict[str, dict[Chunk, None]] = {}
            for key in keys:
                chains.setdefault(key.model_name, {})[chunk_of(key)] = None
            for chain in chains.values():
                for chunk in chain:
                    self._residency.touch(chunk, now_s)
                self._book.extend(list(chain))

    def ended(self, request_id: str) -> None:
        """A request is over."""
        now_s = self._clock.now_s()
        with self._lock:
            program = self._book.end(request_id, now_s)
            if program is None:
                return
            self._ended[request_id] = program
            _bound(self._ended)
            self._decide(program, self._hints.pop(request_id, None), now_s)

    def hint(self, hint: Hint) -> None:
        """What a client knows of a turn that ended or is about to."""
        now_s = self._clock.now_s()
        with self._lock:
            self.counts["hints"] += 1
            program = self._ended.get(hint.request_id)
            if program is None:
                self._hints[hint.request_id] = hint
                _bound(self._hints)
            elif not program.running:
                self._decide(program, hint, now_s)

    def _decide(self, program: ChainProgram, hint: Hint | None, now_s: float) -> None:
        """A turn ended (or more is known of one that did): set the deadline."""
        program.is_finished = hint is not None and hint.is_last_step
        if hint is not None and hint.tool:
            program.gap_key = GapKey(hint.tool)
        if program.is_finished:
            self.counts["programs_finished"] += 1
            self._gaps.drop(program.number)
            program.gap_key, program.decision = FINAL_GAP, None
            program.deadline_s = now_s
            self._leaving[program] = None
            return
        self._gaps.start(program.number, program.gap_key, now_s)
        wish_s = hint.ttl_s if hint is not None else None
        program.is_told = wish_s is not None
        decision = self._ask(program, now_s, waited_s=0.0)
        program.decision = decision
        ttl_s = decision.ttl_s if wish_s is None else wish_s
        self._set_deadline(program, now_s, min(ttl_s, self._config.max_ttl_s))

    def _set_deadline(self, program: ChainProgram, now_s: float, ttl_s: float) -> None:
        program.deadline_s = now_s + ttl_s
        heapq.heappush(
            self._deadlines, (program.deadline_s, next(self._order), program)
        )

    def _ask(self, program: ChainProgram, now_s: float, waited_s: float) -> Decision:
        leaf = program.chain[-1] if program.chain else None
        in_l2 = leaf is not None and self._residency.is_in_l2(leaf)
        turn = TurnFacts(
            program_id=str(program.number),
            turn_index=program.turns,
            gap_key=program.gap_key,
            context_tokens=program.context_tokens,
            kv_blocks=len(program.chain),
            waited_s=waited_s,
        )
        view = View(
            gaps=self._gaps,
            costs=self._costs,
            now_s=now_s,
            tier="disk" if in_l2 else None,
        )
        if waited_s == 0.0:
            self._costs.observe_benefit(view.recovery_s(turn))
        try:
            decision = self._policy.decide(turn, view)
        except Exception:  # noqa: BLE001 - policies may be anybody's code
            self.counts["policy_errors"] += 1
            return Decision(0.0, "policy:raised")
        return decision if decision.ttl_s >= 0 else Decision(0.0, "policy:nonsense")

    def _learn(self, program: ChainProgram, gap_s: float) -> None:
        self._costs.observe_gap(gap_s)
        decision, program.decision = program.decision, None
        if decision is None:
            return
        try:
            self._policy.observe_outcome(
                program.gap_key, gap_s, decision.ttl_s, decision.inputs
            )
        except Exception:  # noqa: BLE001 - policies may be anybody's code
            self.counts["policy_errors"] += 1

    # what is where

    def reserved(self, keys: Sequence[ObjectKey]) -> None:
        with self._lock:
            self._residency.reserve(keys)
            self._headroom.wrote(len(keys))

    def written(self, keys: Sequence[ObjectKey]) -> None:
        now_s = self._clock.now_s()
        with self._lock:
            self._residency.write(keys, now_s)

    def deleted(self, keys: Sequence[ObjectKey]) -> None:
        with self._lock:
            self._residency.delete(keys)

    def stored_below(self, keys: Iterable[ObjectKey]) -> None:
        with self._lock:
            self._residency.add_l2(keys)

    def deleted_below(self, keys: Iterable[ObjectKey]) -> None:
        with self._lock:
            self._residency.drop_l2(keys)

    def reloaded(self, objects: int, chunk_tokens: int, seconds: float) -> None:
        """`objects` came up from L2 within `seconds`."""
        with self._lock:
            tokens = round(objects * chunk_tokens / self._residency.objects_a_chunk)
            self._costs.observe_reload("disk", tokens, seconds)

    # what leaves

    def eviction_order(self) -> list[ObjectKey]:
        """All objects of L1: abandoned writes, then what is least worth first."""
        now_s = self._clock.now_s()
        with self._lock:
            keys = self._residency.reserved()
            for chunk in chunks_to_evict(self._book, self._residency, now_s):
                keys.extend(self._residency.objects(chunk))
            return keys

    def to_evict(self, is_eligible: Callable[[ObjectKey], bool]) -> list[ObjectKey]:
        """What has to go now, so that what is written until the next look fits.

        Args:
            is_eligible: whether L1 may delete an object now.
        """
        used = self._usage()
        with self._lock:
            number = self._headroom.missing(self._residency.num_l1, used)
        if not number:
            return []
        eligible = (key for key in self.eviction_order() if is_eligible(key))
        chosen = list(itertools.islice(eligible, number))
        self.counts["evicted"] += len(chosen)
        return chosen

    def sweep(self) -> list[ObjectKey]:
        """Let deadlines pass.

        Returns:
            Objects of expired and finished programs that L2 has and L1 may drop,
            tails first; none while L1 is emptier than `demote_above`.
        """
        used, now_s = self._usage(), self._clock.now_s()
        with self._lock:
            self._headroom.look()
            self._expire(now_s)
            self._forget_silent(now_s)
            if used <= self._config.demote_above:
                return []
            return self._demotable(now_s)

    def _expire(self, now_s: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now_s:
            deadline_s, _, program = heapq.heappop(self._deadlines)
            if program.running or program.deadline_s != deadline_s:
                continue  # it went on, or got another deadline
            if program.is_finished or not program.chain:
                continue
            left_s = self._prolongation_s(program, now_s)
            if left_s > 0.0:
                self._set_deadline(program, now_s, left_s)
                continue
            self.counts["expired"] += 1
            self._leaving[program] = None

    def _prolongation_s(self, program: ChainProgram, now_s: float) -> float:
        """At its deadline a program is asked about once more, as a pin is."""
        if program.is_told:
            return 0.0
        waited_s = now_s - program.seen_s
        ttl_s = self._ask(program, now_s, waited_s).ttl_s
        return min(ttl_s, self._config.max_ttl_s - waited_s)

    def _forget_silent(self, now_s: float) -> None:
        horizon_s = now_s - self._config.program_idle_s
        for candidates in (self._book.idle(), self._book.under_way()):
            for program in candidates:
                if program.seen_s > horizon_s:
                    break
                self._leaving.pop(program, None)
                self._book.forget(program)
                self.counts["forgotten"] += 1

    def _demotable(self, now_s: float) -> list[ObjectKey]:
        keys: dict[ObjectKey, None] = {}
        for program in list(self._leaving):
            is_gone = True  # nothing of it alone is in L1
            for chunk in reversed(program.chain):
                if any(is_protected(p, now_s) for p in self._book.holders(chunk)):
                    break  # and so is all that lies before it
                objects = self._residency.objects(chunk)
                is_gone = is_gone and not objects
                if objects and not self._residency.is_in_l2(chunk):
                    break  # the tail goes first
                keys.update(dict.fromkeys(objects))
            if is_gone:
                del self._leaving[program]
        return list(keys)

    def status(self) -> dict[str, object]:
        """Plain numbers for `/status`, metrics and the RPC."""
        with self._lock:
            now_s = self._clock.now_s()
            idle = self._book.idle()
            kept = sum(1 for p in idle if is_protected(p, now_s))
            return {
                "policy": self._config.policy,
                "programs": len(self._book),
                "programs_running": self._book.num_running,
                "programs_in_ttl": kept,
                "programs_expired": len(idle) - kept,
                "l1_objects": self._residency.num_l1,
                "l2_objects": self._residency.num_l2,
                "gaps_recorded": self._gaps.total,
                "counts": dict(self.counts),
            }


def _bound(memory: OrderedDict[str, ChainProgram] | OrderedDict[str, Hint]) -> None:
    while len(memory) > MEMORY:
        memory.popitem(last=False)
