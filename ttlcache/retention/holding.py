"""What is decided in a gap: whether its turn is held, and whether for longer."""

from __future__ import annotations

from dataclasses import dataclass

from ttlcache.policies.base import View
from ttlcache.programs.model import Pin, RequestRecord, Turn
from ttlcache.retention.pins import PinTable
from ttlcache.retention.ttl import Retention
from ttlcache.telemetry.journal import NullJournal
from ttlcache.telemetry.metrics import MetricsBuffer
from ttlcache.types import Decision, Finish, HoldOrder, Rank, TurnFacts

#: A prolongation shorter than this is not worth asking for.
MIN_PROLONG_S = 0.05
#: Decisions that one failed allocation may cost, some 20 us each.
REPRICED_AT_ONCE = 64


@dataclass(slots=True)
class Holding:
    """Puts turns before the policy, and what it said into pins and the journal."""

    retention: Retention
    pins: PinTable
    metrics: MetricsBuffer
    journal: NullJournal

    def begin(
        self,
        record: RequestRecord,
        turn: Turn,
        finish: Finish,
        rank: Rank,
        view: View,
        now_s: float,
    ) -> tuple[Decision, HoldOrder | None]:
        """The gap after `turn` begins.

        rank: where its next request will stand.
        """
        facts = _facts(record, turn, finish)
        decision = self.retention.decide(facts, view)
        self.journal.decide(now_s, record, facts, decision, view)
        self.metrics.observe("ttl_seconds", decision.ttl_s)
        if decision.ttl_s <= 0 or finish.kv_blocks <= 0:
            return decision, None
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
        return self._decide_again(pin, facts, view, now_s)

    def reprice(self, view: View, now_s: float) -> list[Pin]:
        """Somebody waits for memory: pins made while it was free are decided anew.

        Such a pin is held for as long as pins may be, and programs that came later may
        not take it: that of a program which is over would keep them waiting so long.

        Returns:
            Those that are worth it no more, at most `REPRICED_AT_ONCE`.
        """
        ended = []
        for pin in self.pins.pop_provisional(REPRICED_AT_ONCE):
            facts = pin.turn.facts
            if facts is None:
                continue
            if facts.requested_ttl_s is not None:
                self._lower_policy_ttl(pin, facts, view, now_s)
            elif not self._decide_again(pin, facts, view, now_s):
                ended.append(pin)
        return ended

    def _decide_again(
        self, pin: Pin, facts: TurnFacts, view: View, now_s: float
    ) -> bool:
        waited_s = now_s - pin.turn.finish_s
        decision = self.retention.prolong(facts, waited_s, view)
        if decision.ttl_s < MIN_PROLONG_S:
            return False
        deadline_s = now_s + decision.ttl_s
        self.pins.set_deadline(pin, deadline_s, provisional=decision.provisional)
        self.journal.extend(now_s, pin, "re-decided")
        return True

    def _lower_policy_ttl(
        self, pin: Pin, facts: TurnFacts, view: View, now_s: float
    ) -> None:
        """A client's own TTL stands; the part that the policy asked for is less now."""
        waited_s = now_s - pin.turn.finish_s
        decision = self.retention.prolong(facts, waited_s, view)
        ends_s = now_s + max(0.0, decision.ttl_s)
        pin.policy_deadline_s = min(pin.policy_deadline_s, ends_s)


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
