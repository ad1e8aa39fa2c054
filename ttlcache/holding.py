"""What is decided in a gap: whether its turn is held, and whether for longer."""

from __future__ import annotations

from dataclasses import dataclass

from ttlcache.events import Finish, HoldOrder
from ttlcache.journal import NullJournal
from ttlcache.metrics import MetricsBuffer
from ttlcache.pins import Pin, PinTable
from ttlcache.places import Places
from ttlcache.policies.base import View
from ttlcache.programs import Turn
from ttlcache.requests import RequestRecord
from ttlcache.retention import Retention
from ttlcache.types import Decision, TurnFacts

#: A prolongation shorter than this is not worth asking for.
MIN_PROLONG_S = 0.05


@dataclass(slots=True)
class Holding:
    """Puts turns before the policy, and what it said into pins and the journal."""

    retention: Retention
    places: Places
    pins: PinTable
    metrics: MetricsBuffer
    journal: NullJournal

    def begin(
        self,
        record: RequestRecord,
        turn: Turn,
        finish: Finish,
        view: View,
        now_s: float,
    ) -> tuple[Decision, HoldOrder | None]:
        """The gap after `turn` begins."""
        facts = _facts(record, turn, finish)
        decision = self.retention.decide(facts, view)
        self.journal.decide(now_s, record, facts, decision, view)
        turn.memo = self.retention.memo(decision)
        self.metrics.observe("ttl_seconds", decision.ttl_s)
        if decision.ttl_s <= 0 or finish.kv_blocks <= 0:
            return decision, None
        rank = self.places.rank_of_next(record)
        pin = self.retention.start(record.program, turn, decision, finish, now_s, rank)
        if pin is None:
            return decision, None
        self.journal.pin(now_s, pin)
        turn.facts = facts
        # Not a copy: that touches every block of a long context.
        turn.hashes = finish.hashes if turn.num_hashes else ()
        return decision, HoldOrder(pin.pin_id, pin.kv_blocks)

    def prolong(self, pin: Pin, view: View, now_s: float) -> bool:
        """Decide again at the deadline, given how long the gap has lasted.

        A pin is an option, not a promise. Rules that plan a gap from its start
        answer 0 here; a client's own TTL is final.
        """
        facts = pin.turn.facts
        if facts is None or facts.requested_ttl_s is not None:
            return False
        waited_s = now_s - pin.turn.finish_s
        ttl_s = self.retention.prolong(facts, waited_s, view)
        if ttl_s < MIN_PROLONG_S:
            return False
        self.pins.set_deadline(pin, now_s + ttl_s)
        self.journal.extend(now_s, pin, "re-decided")
        return True


def _facts(record: RequestRecord, turn: Turn, finish: Finish) -> TurnFacts:
    return TurnFacts(
        record.program.program_id,
        record.program.turns_finished,
        turn.gap_key,
        turn.context_tokens,
        finish.kv_blocks,
        record.hints.ttl_s,
        record.hints.tool_eta_s,
    )
