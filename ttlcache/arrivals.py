"""A request comes: whose it is, where it stands; then it gets memory, and its pin."""

from __future__ import annotations

from dataclasses import dataclass

from ttlcache.departures import Departures
from ttlcache.programs.continuation import Continuation, Relation, relate
from ttlcache.programs.divergence import compare
from ttlcache.programs.identity import Identifier
from ttlcache.programs.model import Claim, Pin, Program, RequestRecord, wait_kind
from ttlcache.programs.places import Place
from ttlcache.programs.table import client_key
from ttlcache.retention.open_turns import TurnBook
from ttlcache.retention.ttl import Retention
from ttlcache.scheduling.admission import AdmissionControl
from ttlcache.scheduling.queue_order import QueueOrder
from ttlcache.tables import Tables
from ttlcache.types import Arrival, IdentityRule, PinOutcome


@dataclass(slots=True)
class Arrivals:
    """Makes records of requests, and follows them until they run."""

    tables: Tables
    identifier: Identifier
    queue_order: QueueOrder
    turns: TurnBook
    retention: Retention
    admission: AdmissionControl
    departures: Departures
    _seq: int = 0

    def arrive(self, arrival: Arrival) -> RequestRecord:
        """Find the request's program, close its gap."""
        tables = self.tables
        now_s = tables.clock.now_s()
        self.departures.forget(arrival.request_id)
        known = len(tables.programs)
        program, rule = self.identifier.identify(arrival, now_s)
        tables.metrics.count("turns_identified", rule.value)
        if len(tables.programs) > known:
            tables.metrics.count("programs_started")
            self.retention.make_room_for_others()
        for reason in arrival.hints.rejected:
            tables.metrics.count("hints_rejected", reason)
        continuation = relate(program, arrival.hashes, arrival.num_tokens)
        self._adopt(program, arrival)
        place = self._place(program, continuation)
        record = self._new_record(arrival, program, place, now_s)
        if rule in (IdentityRule.HINT, IdentityRule.SESSION):
            self._compare(record, arrival, continuation)
        self.queue_order.assign_place(record)
        program.in_flight += 1
        pin, record.reusable_tokens = self.turns.follow(
            program, continuation, record.request_id, now_s
        )
        if pin is not None:
            record.pin_id = pin.pin_id
        turn = continuation.turn
        if turn is not None:
            record.lower_epoch = turn.lower_epoch
        tables.journal.arrive(now_s, record, rule, arrival, continuation)
        return record

    def on_allocated(self, request_id: str, cached_tokens: int) -> None:
        """The request got its blocks: it claims its pin."""
        tables = self.tables
        record = tables.requests.get(request_id)
        if record is None:
            return
        first = record.admitted_s is None
        now_s = tables.clock.now_s()
        if first:
            record.admitted_s = now_s
            record.cached_tokens = cached_tokens
            if self._tests_the_tier(record) and record.lost_its_kv(cached_tokens):
                record.lost_tokens = record.reusable_tokens - cached_tokens
            self.queue_order.on_admission(record)
            context_blocks = record.num_tokens / tables.block_tokens
            self.admission.on_turn_running(record.program, context_blocks)
        elif record.first_token_s is None:
            if not record.reloads:  # preempted: all anew
                record.cached_tokens = cached_tokens
            record.reloads = False
        pin = tables.pins.get(record.pin_id)
        record.pin_id = None
        claim = None if pin is None else self._claim(pin, cached_tokens)
        tables.journal.admit(now_s, record, cached_tokens, claim, not first)
        record.refused_s = None
        if first:
            kind = wait_kind(record, cached_tokens, pin)
            tables.metrics.observe("wait_seconds", now_s - record.queued_s, kind)
        if pin is not None:
            self.turns.end_pin(pin, PinOutcome.CLAIMED)
        elif first and record.lost_its_kv(cached_tokens):
            tables.metrics.count("evicted_returns")
            tables.costs.observe_return_wait(now_s - record.queued_s)

    def _claim(self, pin: Pin, cached_tokens: int) -> Claim:
        """What the claim spares the engine, against plain vLLM's prefix cache."""
        tables = self.tables
        claimed = min(cached_tokens, pin.kv_tokens)
        behind_blocks = int(tables.backlog.tokens / tables.block_tokens)
        kept = int(min(tables.holder.claim(pin.pin_id, behind_blocks), claimed))
        tables.metrics.count("claimed_tokens", by=claimed)
        tables.metrics.count("prefill_tokens_saved", by=claimed - kept)
        saved_s = tables.costs.prefill_s(claimed, kept) if claimed > kept else 0.0
        tables.backlog.on_saved(claimed - kept, saved_s)
        return Claim(pin.pin_id, claimed, claimed - kept, saved_s)

    def _tests_the_tier(self, record: RequestRecord) -> bool:
        """Whether what the request finds below tells how much the tier keeps.

        Not where it never got the turn, was away since, or is not asked for it.
        """
        up = self.tables.lower_tier is not None
        was_left = record.lower_epoch == self.tables.lower_epoch
        return up and was_left and record.asked_below

    def _compare(
        self, record: RequestRecord, arrival: Arrival, continuation: Continuation
    ) -> None:
        record.head_tokens, record.divergence = compare(
            record.program,
            arrival.hashes,
            arrival.num_tokens,
            self.tables.block_tokens,
            continues=continuation.relation is Relation.CONTINUES,
        )
        if record.divergence is not None and record.divergence.is_sure:
            cause = record.divergence.cause.value
            self.tables.metrics.count("turns_diverged", cause)

    def _new_record(
        self, arrival: Arrival, program: Program, place: Place, now_s: float
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
            place,
            arrival.num_tokens,
        )
        self.tables.backlog.on_busy()
        self.tables.requests[arrival.request_id] = record
        return record

    def _place(self, program: Program, continuation: Continuation) -> Place:
        """Where the request stands: where the context does that it continues.

        A request that continues none, or none of a full block, has nothing at stake: it
        stands where a newcomer stands, whatever id or parent it names.
        """
        turn = continuation.turn
        continues = continuation.relation is Relation.CONTINUES
        if continues and turn is not None and turn.num_hashes:
            program.place = turn.place or program.place
        elif program.turns_finished or program.in_flight:
            program.place = self.tables.programs.new_place(program.tenant)
        return program.place

    def _adopt(self, program: Program, arrival: Arrival) -> None:
        parent_id = arrival.hints.parent_id
        if parent_id is None or program.parent is not None:
            return
        parent = self.tables.programs.get(client_key(arrival.tenant, parent_id))
        if parent is not None:
            program.adopt(parent)
