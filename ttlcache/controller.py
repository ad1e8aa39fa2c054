"""The facade that an engine adapter calls: one method per event of a turn.

    arrive → (priority)* → admit → prefilled → finish … gap … → claim | expire

The controller decides and keeps the tables; blocks are referenced and released
only through the `BlockHolder` that the adapter provides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ttlcache import admission, policies, progress
from ttlcache.clock import Clock
from ttlcache.config import PROGRAM_ORDERINGS, TTLCacheConfig
from ttlcache.continuation import relate
from ttlcache.costs import CostModel
from ttlcache.estimators import Memoryfulness
from ttlcache.events import Admission, Arrival, BlockHolder, Finish, HoldOrder, Urgency
from ttlcache.gaps import GapHistory, interned
from ttlcache.hints import Hints
from ttlcache.identity import Identifier
from ttlcache.journal import NullJournal
from ttlcache.metrics import MetricsBuffer
from ttlcache.ordering import ORDERINGS, PriorityKey, QueuedTurn, Rank
from ttlcache.pins import Pin, PinTable
from ttlcache.policies.base import View
from ttlcache.prefixes import PrefixIndex
from ttlcache.programs import (
    Program,
    ProgramTable,
    Turn,
    client_key,
)
from ttlcache.reclaim import Reclaimer
from ttlcache.retention import Retention
from ttlcache.toolcalls import combine, key_for_tool
from ttlcache.turns import OnPinEnd, TurnBook
from ttlcache.types import FINAL_GAP, Decision, GapKey, PinOutcome, TurnFacts
from ttlcache.worksize import Work, WorkSizes

#: Gap key of a turn whose output nobody could read.
UNKNOWN_GAP = GapKey("unknown")
#: A return whose cache hit is below this share of its context lost its KV.
EVICTED_BELOW = 0.5
#: A prolongation shorter than this is not worth asking for.
MIN_PROLONG_S = 0.05


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request between arrival and finish."""

    request_id: str
    program: Program
    hints: Hints
    seq: int
    queued_s: float
    user_priority: int
    num_tokens: int = 0  # of its prompt
    program_seq: int = 0  # where its program stood when it was queued, or moved back
    claim_counts: bool = True  # not while its program's quantum is used up
    work_left_s: float | None = None  # of its program, expected when it was queued
    reusable_tokens: int = 0  # context of the turn it continues that it repeats
    promoted_s: float | None = None  # when its ordering's anti-starvation rule struck
    pin_id: int | None = None  # the pin it will claim
    admitted_s: float | None = None
    cached_tokens: int = 0
    first_token_s: float | None = None
    prefill_from_s: float | None = None  # after a reload; else from `admitted_s`


def _wait_kind(record: RequestRecord, cached_tokens: int, pin: Pin | None) -> str:
    """One of `metrics.WAIT_KINDS`."""
    if pin is not None:
        return "claimed"
    if not record.reusable_tokens:
        return "new"
    is_lost = cached_tokens < EVICTED_BELOW * record.reusable_tokens
    return "lost" if is_lost else "cached"


@lru_cache(maxsize=4096)
def _named_gap(tools: tuple[str, ...]) -> GapKey | None:
    return combine(key_for_tool(name) for name in tools)


class Controller:
    """Programs, pins, gaps, costs and one policy, driven by engine events."""

    def __init__(
        self,
        config: TTLCacheConfig,
        clock: Clock,
        holder: BlockHolder,
        block_tokens: int,
        *,
        gaps: GapHistory | None = None,
        costs: CostModel | None = None,
        on_rekey: Callable[[str], None] | None = None,
        journal: NullJournal | None = None,
        on_pin_end: OnPinEnd | None = None,
    ) -> None:
        """
        Args:
            block_tokens: tokens per prefix-cache hash.
            on_rekey: told the id of a waiting request whose priority changed.
            journal: told every event.
            on_pin_end: told how a pin ends, just before its blocks are released.
        """
        self.config = config
        self.metrics = MetricsBuffer()
        self.gaps = gaps if gaps is not None else GapHistory()
        self.costs = costs if costs is not None else CostModel()
        self.memory = Memoryfulness()
        self.work = WorkSizes()
        self.pins = PinTable()
        self.programs = ProgramTable(config.max_programs, config.program_idle_s)
        self.requests: dict[str, RequestRecord] = {}
        self.retention_enabled = True
        #: The tier that an expired turn's KV goes to, None while there is none.
        self.lower_tier: str | None = None
        #: What the policy said of the request that finished last, None where it was
        #: not asked: nobody continues such a turn, or nothing is retained.
        self.last_decision: Decision | None = None
        self.journal = journal if journal is not None else NullJournal()
        self._clock = clock
        self._holder = holder
        self._block_tokens = block_tokens
        #: Set before the first request, if at all.
        self.ordering = ORDERINGS[config.ordering]()
        self._identifier = Identifier(
            self.programs,
            PrefixIndex(block_tokens) if config.prefix_inference else None,
        )
        self._turns = TurnBook(
            clock=clock,
            holder=holder,
            block_tokens=block_tokens,
            pins=self.pins,
            gaps=self.gaps,
            costs=self.costs,
            metrics=self.metrics,
            max_ttl_s=config.max_ttl_s,
            on_rekey=on_rekey,
            journal=self.journal,
            on_pin_end=on_pin_end,
        )
        self.pins.on_shrink = lambda pin: self.journal.shrink(clock.now_s(), pin)
        self._reclaimer = Reclaimer(
            self.pins, holder, self._turns.end_pin, clock, config.max_pinned_fraction
        )
        self.owed = self._reclaimer.owed
        self._retention = Retention(
            config,
            policies.create(config.policy, config.policy_options),
            self.pins,
            holder,
            self._reclaimer,
            self.metrics,
            lambda: self.programs.num_tenants(clock.now_s()),
        )
        self._turns.learn = self._retention.learn
        self._admission = admission.create(
            config.admission, config.admission_half_life_s
        )
        self._seq = 0

    # --- a request comes -------------------------------------------------

    def arrive(self, arrival: Arrival) -> RequestRecord:
        """A request entered the queue: find its program, close its gap."""
        now_s = self._clock.now_s()
        stale = self.requests.pop(arrival.request_id, None)
        if stale is not None:
            # The engine reuses an id whose end we never heard of.
            self._leave(stale)
        known = len(self.programs)
        program, rule = self._identifier.identify(arrival, now_s)
        self.metrics.count("turns_identified", rule.value)
        if len(self.programs) > known:
            self.metrics.count("programs_started")
            self._retention.make_room_for_others()
        for reason in arrival.hints.rejected:
            self.metrics.count("hints_rejected", reason)
        continuation = relate(program, arrival.hashes, arrival.num_tokens)
        record = self._new_record(arrival, program, now_s)
        self._adopt(program, arrival)
        self._stand(record)
        program.in_flight += 1
        pin, record.reusable_tokens = self._turns.follow(
            program, continuation, record.request_id, now_s
        )
        if pin is not None:
            record.pin_id = pin.pin_id
        self.journal.arrive(now_s, record, rule, arrival, continuation)
        return record

    def priority(self, request_id: str, *, preempted: bool = False) -> PriorityKey:
        """Queue key of a waiting request; smaller is served first.

        Raises:
            KeyError: the request never arrived here.
        """
        record = self.requests[request_id]
        return self.ordering.key(self._queued(record, preempted))

    def promote_at_s(self, request_id: str) -> float:
        """When waiting alone will change the request's key; `math.inf` for never."""
        return self.ordering.promote_at_s(
            self._queued(self.requests[request_id], preempted=False)
        )

    def promote(self, request_id: str) -> None:
        """The ordering's anti-starvation rule strikes: its counters start anew."""
        record = self.requests[request_id]
        record.promoted_s = self._clock.now_s()
        record.program.service_s = record.program.wait_s = 0.0

    def stand_back(self, request_id: str) -> bool:
        """Whether the request's place is out of date; `priority` answers anew then.

        Asked about the head of the queue: others of its family may have used up the
        quantum since it was queued. A place may change once per quantum, no more.
        """
        record = self.requests.get(request_id)
        if record is None or record.admitted_s is not None:
            return False  # what was preempted is in the middle of its turn
        if record.program_seq == record.program.seniority.seq:
            return False
        self._stand(record)
        return True

    def admission(
        self, request_id: str, kv_blocks: float, *, by_program: bool = True
    ) -> Admission:
        """Whether a waiting request needing `kv_blocks` may take memory now.

        by_program: whether the queue stands in this controller's order. Who is kept
        waiting at the head of another one would keep programs before it waiting.
        """
        record = self.requests.get(request_id)
        if record is None or record.admitted_s is not None:
            return Admission.ADMIT
        now_s, pressure = self._clock.now_s(), self._holder.pressure()
        if self.owed and by_program and self.config.ordering in PROGRAM_ORDERINGS:
            rank = self.ordering.rank(self._queued(record, preempted=False))
            spare = pressure.free_blocks - kv_blocks
            if not self.owed.leaves_room(record.program, rank, spare, now_s):
                return Admission.WAIT
        return self._admission.admit(
            record.program, kv_blocks, pressure.pool_blocks, now_s
        )

    def admit(self, request_id: str, cached_tokens: int) -> None:
        """The request got its blocks: it claims its pin.

        Args:
            cached_tokens: prompt tokens found in GPU memory.
        """
        record = self.requests.get(request_id)
        if record is None:
            return
        first = record.admitted_s is None
        now_s = self._clock.now_s()
        if first:
            record.admitted_s = now_s
            record.cached_tokens = cached_tokens
            since_s = record.queued_s
            if record.promoted_s is not None:
                since_s = record.promoted_s
            if now_s > since_s:
                record.program.wait_s += now_s - since_s
            record.program.seniority.on_admission()
            blocks = record.num_tokens / self._block_tokens
            self._admission.reasons(record.program, blocks, now_s)
            self.owed.settle(record.program)
        elif record.prefill_from_s is not None:
            record.prefill_from_s = now_s  # its reload is over: the prefill begins
        pin = self.pins.get(record.pin_id)
        record.pin_id = None
        self.journal.admit(now_s, record, cached_tokens, pin, self.costs, not first)
        if first:
            kind = _wait_kind(record, cached_tokens, pin)
            self.metrics.observe("wait_seconds", now_s - record.queued_s, kind)
        if pin is not None:
            saved = min(cached_tokens, pin.kv_tokens)
            self.metrics.count("prefill_tokens_saved", by=saved)
            self._turns.end_pin(pin, PinOutcome.CLAIMED)
        elif first and cached_tokens < EVICTED_BELOW * record.reusable_tokens:
            self.metrics.count("evicted_returns")
            self.costs.observe_return_wait(now_s - record.queued_s)

    def prefilled(self, request_id: str, prompt_tokens: int) -> None:
        """The first output token is there: learn what prefill costs."""
        record = self.requests.get(request_id)
        if record is None or record.admitted_s is None:
            return
        if record.first_token_s is not None:
            return
        since_s = record.admitted_s
        if record.prefill_from_s is not None:
            since_s = record.prefill_from_s
        now_s = record.first_token_s = self._clock.now_s()
        seconds = now_s - since_s
        self.costs.observe_prefill(prompt_tokens, record.cached_tokens, seconds)
        self.journal.first_token(now_s, record, seconds, prompt_tokens)

    def reloading(self, request_id: str) -> None:
        """A part of an admitted request's prompt is on its way from a lower tier."""
        record = self.requests.get(request_id)
        if record is not None:
            record.prefill_from_s = self._clock.now_s()

    def reloaded(self, request_id: str, tokens: int) -> None:
        """`tokens` of the prompt came, 0 where that failed: prefill what is left."""
        if tokens <= 0:
            self.metrics.count("failed_reloads")
            return
        record = self.requests.get(request_id)
        if record is not None:
            record.cached_tokens += tokens
            record.prefill_from_s = self._clock.now_s()

    def learn_reload(self, tier: str | None, tokens: int, seconds: float) -> None:
        """What a reload cost, from the order to the arrival of the last byte.

        tier: None where it is not known from which one it came.
        """
        self.metrics.count("reloads", tier or "unknown")
        self.metrics.count("reloaded_tokens", tier or "unknown", by=tokens)
        self.metrics.observe("reload_seconds", seconds)
        if tier is not None:
            self.costs.observe_reload(tier, tokens, seconds)

    # --- a request goes --------------------------------------------------

    def finish(self, finish: Finish) -> HoldOrder | None:
        """A request left the engine: decide, and maybe order a pin.

        The adapter must take the references of a returned order at once, before
        the engine frees the request's blocks.
        """
        self.last_decision = None
        record = self.requests.pop(finish.request_id, None)
        if record is None:
            return None
        self._leave(record)
        program = record.program
        now_s = self._clock.now_s()
        self.journal.finish(now_s, record, finish)
        self.programs.touch(program, now_s)
        if record.admitted_s is not None:
            if now_s > record.admitted_s:
                self._charge(program, now_s - record.admitted_s)
            if not program.ended:
                blocks = finish.num_tokens / self._block_tokens
                self._admission.acts(program, blocks, now_s)
        if not finish.completed:
            return None
        program.turns_finished += 1
        self._observe_work(record, finish, now_s)
        if record.hints.is_last_step or program.ended:
            self._end_program(program, "last_step")
            return None
        return self._retain(record, finish, now_s)

    def end(self, tenant: str, program_id: str, how: str = "told") -> bool:
        """A program is over: release all its pins. False if it is unknown."""
        program = self.programs.get(client_key(tenant, program_id))
        if program is None:
            return False
        self._end_program(program, how)
        return True

    def progress(
        self, tenant: str, program_id: str, remaining: progress.Remaining
    ) -> list[dict[str, Any]] | None:
        """A tool reports in mid-gap: decide again. None if the program is unknown."""
        program = self.programs.get(client_key(tenant, program_id))
        if program is None:
            return None
        now_s = self._clock.now_s()
        self.programs.touch(program, now_s)
        return progress.replan(
            program,
            remaining,
            self.pins,
            self._turns,
            self._retention,
            self.journal,
            self._view(now_s),
            now_s,
        )

    # --- time and pressure -----------------------------------------------

    def tick(self) -> None:
        """Before each step: expire pins, forget idle programs."""
        now_s = self._clock.now_s()
        for pin in self.pins.expired(now_s):
            if not self._prolong(pin, now_s):
                self._turns.end_pin(pin, PinOutcome.EXPIRED)
        for program in self.programs.idle(now_s):
            overdue = now_s - program.last_seen_s > self.config.program_idle_s
            self._end_program(program, "idle" if overdue else "forgotten")

    def reclaim(self, needed_blocks: int, urgency: Urgency, request_id: str) -> int:
        """Blocks freed from pins for a request that failed to get memory."""
        record = self.requests.get(request_id)
        return self._reclaimer.reclaim(
            max(1, needed_blocks),
            urgency,
            record.program if record else None,
            record.pin_id if record else None,
            self.ordering.rank(self._queued(record, preempted=False)) if record else (),
        )

    def release_all(self) -> None:
        """Prefix-cache reset, sleep, shutdown: every pin goes."""
        for pin in list(self.pins):
            self._turns.end_pin(pin, PinOutcome.RESET)
        self.owed.clear()

    def disable(self) -> None:
        """Stop retaining for good; requests go on as if we were not there."""
        self.retention_enabled = False
        self.release_all()

    def working_set_blocks(self) -> float:
        """What running requests take, and pins: less, the longer their tool runs."""
        now_s, half_life_s = self._clock.now_s(), self.config.admission_half_life_s
        admitted = (r for r in self.requests.values() if r.admitted_s is not None)
        running = sum(r.num_tokens for r in admitted) / self._block_tokens
        waits_s = (
            (pin.kv_blocks, max(0.0, now_s - pin.created_s)) for pin in self.pins
        )
        held = sum(n * 2.0 ** (-wait_s / half_life_s) for n, wait_s in waits_s)
        return float(running + held)

    def owed_blocks(self) -> int:
        """What is left free for programs that lost their pins to pressure."""
        return self.owed.blocks(self._clock.now_s())

    def num_waiting_programs(self) -> int:
        """Programs of which a request was not given memory yet."""
        waiting = (r.program for r in self.requests.values() if r.admitted_s is None)
        return len(set(map(id, waiting)))

    # --- inside ------------------------------------------------------------

    def _new_record(
        self, arrival: Arrival, program: Program, now_s: float
    ) -> RequestRecord:
        self._seq += 1
        hints = arrival.hints
        if hints.priority_class is not None:
            program.priority_class = hints.priority_class
        record = RequestRecord(
            arrival.request_id,
            program,
            hints,
            self._seq,
            now_s,  # queued_s
            arrival.user_priority,
            arrival.num_tokens,
        )
        self.requests[arrival.request_id] = record
        return record

    def _adopt(self, program: Program, arrival: Arrival) -> None:
        parent_id = arrival.hints.parent_id
        if parent_id is None or program.parent is not None:
            return
        parent = self.programs.get(client_key(arrival.tenant, parent_id))
        if parent is not None:
            program.adopt(parent)

    def _stand(self, record: RequestRecord) -> None:
        seniority = record.program.seniority
        record.program_seq = seniority.seq
        record.claim_counts = not seniority.is_spent
        if self.ordering.uses_work:
            # A sub-agent is work of its parent, which waits for it.
            whose = record.program.parent or record.program
            record.work_left_s = self.work.left_s(whose.work or Work())

    def _observe_work(
        self, record: RequestRecord, finish: Finish, now_s: float
    ) -> None:
        """What the turn took of the engine, without waits and repeated prefills."""
        outputs = finish.num_tokens - finish.prompt_tokens
        if record.first_token_s is not None and outputs > 1:
            decode_s = (now_s - record.first_token_s) / (outputs - 1)
            self.costs.observe_decode(decode_s)
        program = record.program
        if program.ended or not self.ordering.uses_work:
            return
        if program.work is None:
            program.work = Work()
        self.work.turn_done(
            program.work,
            self.costs.prefill_s(finish.prompt_tokens, record.reusable_tokens),
            max(outputs, 0) * self.costs.decode_token_s,
        )

    def _rank_of_next(self, record: RequestRecord) -> Rank:
        """Where the program's next turn will stand, as far as can be told now."""
        self._stand(record)
        record.promoted_s = None  # a promotion is for one call
        return self.ordering.rank(self._queued(record, preempted=False))

    def _charge(self, program: Program, seconds: float) -> None:
        program.service_s += seconds
        if not self.ordering.places_end:
            return
        if program.seniority.charge(seconds, self.config.seniority_quantum_s):
            program.seniority.requeue(self.programs.next_seq())
            self.metrics.count("quanta_used_up")

    def _queued(self, record: RequestRecord, preempted: bool) -> QueuedTurn:
        program = record.program
        return QueuedTurn(  # by position: names cost half a microsecond here
            record.user_priority,
            preempted,
            record.claim_counts and self.pins.get(record.pin_id) is not None,
            record.program_seq,
            record.seq,  # request_seq
            program.service_s,
            program.wait_s,
            record.queued_s,
            record.promoted_s is not None,
            record.work_left_s,
        )

    def _retain(
        self, record: RequestRecord, finish: Finish, now_s: float
    ) -> HoldOrder | None:
        program = record.program
        turn = self._finished_turn(record, finish, now_s)
        self._turns.open(program, turn)
        self._identifier.remember(program, finish)
        self.costs.observe_footprint(finish.footprint_blocks or finish.kv_blocks)
        if not self.retention_enabled or record.hints.rejected:
            return None
        facts = TurnFacts(
            program.program_id,
            program.turns_finished,
            turn.gap_key,
            turn.context_tokens,
            finish.kv_blocks,
            record.hints.ttl_s,
            record.hints.tool_eta_s,
        )
        view = self._view(now_s)
        decision = self._retention.decide(facts, view)
        self.last_decision = decision
        self.journal.decide(now_s, record, facts, decision, view)
        turn.memo = self._retention.memo(decision)
        self.metrics.observe("ttl_seconds", decision.ttl_s)
        if decision.ttl_s <= 0 or finish.kv_blocks <= 0:
            return None
        pin = self._retention.start(
            program, turn, decision, finish, now_s, self._rank_of_next(record)
        )
        if pin is None:
            return None
        self.journal.pin(now_s, pin)
        turn.facts = facts
        # Not a copy: that touches every block of a long context.
        turn.hashes = finish.hashes if turn.num_hashes else ()
        return HoldOrder(pin.pin_id, pin.kv_blocks)

    def _finished_turn(
        self, record: RequestRecord, finish: Finish, now_s: float
    ) -> Turn:
        # The KV of the last sampled token does not exist.
        context_tokens = max(1, finish.num_tokens - 1)
        num_hashes = min(len(finish.hashes), context_tokens // self._block_tokens)
        return Turn(
            record.seq,  # the token of its gap
            now_s,
            interned(self._gap_key(record.hints, finish)),
            context_tokens,
            num_hashes,
            finish.hashes[num_hashes - 1] if num_hashes else b"",
        )

    def _prolong(self, pin: Pin, now_s: float) -> bool:
        """Decide again at the deadline, given how long the gap has lasted.

        A pin is an option, not a promise. Rules that plan a gap from its start
        answer 0 here; a client's own TTL is final.
        """
        facts = pin.turn.facts
        if facts is None or facts.requested_ttl_s is not None:
            return False
        waited_s = now_s - pin.turn.finish_s
        ttl_s = self._retention.prolong(facts, waited_s, self._view(now_s))
        if ttl_s < MIN_PROLONG_S:
            return False
        self.pins.set_deadline(pin, now_s + ttl_s)
        self.journal.extend(now_s, pin, "re-decided")
        return True

    @staticmethod
    def _gap_key(hints: Hints, finish: Finish) -> GapKey:
        if hints.tools:
            named = _named_gap(hints.tools)
            if named is not None:
                return named
        if finish.detect is None:
            return UNKNOWN_GAP
        return finish.detect() or FINAL_GAP

    def _view(self, now_s: float) -> View:
        return View(
            self.gaps,
            self.costs,
            self.memory.eta,
            self.memory.avg_turns,
            self._holder.pressure(),
            now_s,
            self.lower_tier,
        )

    def _end_program(self, program: Program, how: str) -> None:
        if program.ended:
            return
        self.programs.remove(program)
        self.metrics.count("programs_ended", how)
        now_s = self._clock.now_s()
        self.journal.end(now_s, program, how)
        self._admission.leaves(program, now_s)
        self.owed.settle(program)
        if program.turns_finished:
            self.memory.add(program.turns_finished)
        if program.work is not None:
            self.work.ended(program.work)
        self._turns.close_all(program)
        self._turns.renew_parent(program)

    def _leave(self, record: RequestRecord) -> None:
        """The request is gone; somebody else may continue a turn it did not claim."""
        program = record.program
        program.in_flight -= 1
        if program.ended and not program.in_flight:
            self._admission.leaves(program, self._clock.now_s())
        pin = self.pins.get(record.pin_id)
        record.pin_id = None
        if pin is None:
            return
        self.pins.unhold(pin, record.request_id)
        if pin.held:
            return
        if program.ended:
            self._turns.end_pin(pin, PinOutcome.ENDED)
        else:
            self._turns.bound(program)
