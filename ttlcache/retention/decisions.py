"""For how long a finished turn is pinned, decided at five moments of its gap:

- `retain`: the turn ended; a pin, as far as policy and caps allow.
- `redecide_at_deadline`: the pin's time is over.
- `redecide_under_pressure`: a request waits for memory; pins made while none did.
- `redecide_on_progress`: the tool reports how long it still needs.
- `redecide_on_subagent_end`: the sub-agent that its program waited for has ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ttlcache.config import TTLCacheConfig
from ttlcache.estimators.costs import CostModel
from ttlcache.estimators.gap_history import GapHistory
from ttlcache.estimators.memoryfulness import Memoryfulness
from ttlcache.policies.base import Policy, View
from ttlcache.programs.model import Pin, Program, RequestRecord, Turn
from ttlcache.retention.pin_table import PinTable
from ttlcache.retention.reclaim import Reclaimer
from ttlcache.retention.tier_knowledge import TierKnowledge
from ttlcache.telemetry.events import Telemetry
from ttlcache.toolcalls.tool_names import is_subagent
from ttlcache.types import (
    BlockHolder,
    Decision,
    Finish,
    Finished,
    PinOrder,
    PinOutcome,
    Rank,
    TurnFacts,
)

#: Below this learnt share only the part that the program reuses is pinned.
PARTIAL_REUSE_BELOW = 0.9
#: Of the pinned cap, what pins that outlive the policy's TTL may hold together where
#: there is more than one tenant.
CLIENT_TTL_SHARE = 0.25
#: Seconds for the result to travel after a tool's announced end.
ETA_MARGIN_S = 1.0
#: An engine with nothing to run never waits longer than this for a pin's next turn.
MAX_STALL_WAIT_S = 60.0
#: A TTL shorter than this is not worth going on for.
MIN_PROLONG_S = 0.05
#: Decisions that one failed allocation may cost, some 20 us each.
REPRICED_AT_ONCE = 64
#: Any number of requests may end with the same block: so many of their turns are
#: pinned. Each pin costs memory, and time when pins give way.
MAX_ALIKE = 8
#: Pins together reference so many times the pool at most, for the same reason.
MAX_SHARING = 16

#: Seconds waited so far -> seconds that the tool still needs; None: nothing new.
Remaining = Callable[[float], float | None]


@dataclass(slots=True)
class Retention:
    """Decides TTLs within the caps; starts pins and moves their deadlines.

    is_enabled: False once retention is turned off for good.
    """

    config: TTLCacheConfig
    policy: Policy
    gaps: GapHistory
    costs: CostModel
    memoryfulness: Memoryfulness
    tier_knowledge: TierKnowledge
    pins: PinTable
    holder: BlockHolder
    reclaimer: Reclaimer
    telemetry: Telemetry
    num_tenants: Callable[[], int] = lambda: 1
    is_enabled: bool = True

    # --- the five moments ------------------------------------------------

    def retain(
        self,
        record: RequestRecord,
        turn: Turn,
        finish: Finish,
        rank: Rank,
        now_s: float,
    ) -> Finished:
        """The gap after `turn` begins.

        rank: where its next request will stand.
        """
        facts, view = _facts(record, turn, finish), self._view(now_s)
        decision = self._decide(facts, view)
        self.telemetry.decide(now_s, record, facts, decision, view)
        if decision.ttl_s <= 0 or finish.kv_blocks <= 0:
            return Finished(decision)
        pin = self._start(record.program, turn, decision, finish, now_s, rank)
        if pin is None:
            return Finished(decision)
        self.telemetry.pin(now_s, pin)
        turn.facts = facts
        # Not a copy: that touches every block of a long context.
        turn.hashes = finish.hashes if turn.num_hashes else ()
        return Finished(decision, PinOrder(pin.pin_id, pin.kv_blocks))

    def redecide_at_deadline(self, pin: Pin, now_s: float) -> bool:
        """Whether the pin goes on, given how long the gap has lasted.

        A pin is an option, not a promise. Rules that plan a gap from its start
        answer 0 here; a client's own TTL is final.
        """
        facts = pin.turn.facts
        if facts is None or facts.requested_ttl_s is not None:
            return False
        return self._prolong(pin, facts, self._view(now_s), now_s)

    def redecide_under_pressure(self, now_s: float) -> int:
        """A request waits for memory: pins made while none did are decided anew.

        They last for `max_ttl_s`, and newer programs may not take them: if theirs is
        over, those would wait all that time. At most `REPRICED_AT_ONCE` a call.

        Returns:
            Blocks that became free.
        """
        uncontended = self.pins.pop_uncontended(REPRICED_AT_ONCE)
        if not uncontended:
            return 0
        ended, view = [], self._view(now_s)
        for pin in uncontended:
            facts = pin.turn.facts
            if facts is None:
                continue
            if facts.requested_ttl_s is not None:
                self._lower_policy_ttl(pin, facts, view, now_s)
            elif not self._prolong(pin, facts, view, now_s):
                ended.append(pin)
        return sum(self._expire(pin) for pin in ended)

    def redecide_on_progress(
        self, program: Program, remaining: Remaining, now_s: float
    ) -> list[dict[str, Any]]:
        """New deadlines for the pins of a program whose tool reported.

        A pin that is not worth the rest of the wait is released at once. A pin whose
        next turn already waits is left alone.

        Returns:
            The pins that the program still has, each with its `ttl_left_s`.
        """
        view = self._view(now_s)
        for turn in list(program.awaited_turns):
            pin = self.pins.get(turn.pin_id)
            if pin is None or pin.has_claimant or turn.facts is None:
                continue
            waited_s = max(0.0, now_s - turn.finish_s)
            left_s = remaining(waited_s)
            if left_s is None:
                continue
            turn.facts = turn.facts._replace(tool_eta_s=waited_s + left_s)
            decision = self._redecide(turn.facts, waited_s, view, is_end_known=True)
            if decision.ttl_s > 0:
                ends_s, uncontended = now_s + decision.ttl_s, decision.uncontended
                self.pins.set_deadline(pin, ends_s, uncontended=uncontended)
                self.telemetry.extend(now_s, pin, "tool progress")
            else:
                self._expire(pin)
        live = (self.pins.get(turn.pin_id) for turn in program.awaited_turns)
        return [_as_json(pin, now_s) for pin in live if pin is not None]

    def redecide_on_subagent_end(self, child: Program, now_s: float) -> None:
        """Its parent is about to go on: hold that for as long as a rebuild takes."""
        if child.parent is None:
            return
        for turn in child.parent.awaited_turns:
            pin = self.pins.get(turn.pin_id)
            if pin is None or not is_subagent(turn.gap_key):
                continue
            ttl_s = self.costs.recovery_s(turn.context_tokens)
            ttl_s = min(ttl_s, self.config.max_ttl_s)
            self.pins.set_deadline(pin, max(pin.deadline_s, now_s + ttl_s))
            self.telemetry.extend(now_s, pin, "sub-agent ended")
        # Chains of ended sub-agents must not keep each other in memory.
        child.parent = None

    def make_room_for_others(self) -> None:
        """A program came: while its tenant was away, client TTLs may have taken all."""
        if self._client_ttl_excess() > 0:
            self.reclaimer.trim_client_ttls(self._max_client_ttl_blocks())

    # --- decisions -------------------------------------------------------

    def _decide(self, facts: TurnFacts, view: View) -> Decision:
        """The policy's answer, or the client's own TTL, both within `max_ttl_s`."""
        decision = self._ask(facts, view)
        if facts.requested_ttl_s is not None:
            ttl_s = min(facts.requested_ttl_s, self.config.max_ttl_s)
            if ttl_s > decision.ttl_s and self._client_ttl_excess() >= 0:
                ttl_s = decision.ttl_s
            return decision._replace(
                ttl_s=ttl_s, reason="client", policy_ttl_s=decision.ttl_s
            )
        longest_s = self.config.max_ttl_s
        if decision.ttl_s <= longest_s:
            return decision
        return Decision(longest_s, *decision[1:])  # `_replace` takes four times as long

    def _redecide(
        self,
        facts: TurnFacts,
        waited_s: float,
        view: View,
        *,
        is_end_known: bool = False,
    ) -> Decision:
        """For how long to go on holding a turn whose gap has lasted `waited_s`.

        All in all never longer than `max_ttl_s`; below 0 once that is used up.

        Args:
            is_end_known: the tool has just told its end. Of a policy that does not
                read `tool_eta_s` the paper's own cost model answers instead.
        """
        facts = facts._replace(waited_s=waited_s)
        asks_policy = self.policy.reads_eta or not is_end_known
        decision = self._ask(facts, view) if asks_policy else _by_eta(facts, view)
        left_s = self.config.max_ttl_s - waited_s
        return decision._replace(ttl_s=min(decision.ttl_s, left_s))

    def _prolong(self, pin: Pin, facts: TurnFacts, view: View, now_s: float) -> bool:
        """Whether the policy would go on with the pin; if so, for how long from now."""
        decision = self._redecide(facts, now_s - pin.turn.finish_s, view)
        if decision.ttl_s < MIN_PROLONG_S:
            return False
        deadline_s = now_s + decision.ttl_s
        self.pins.set_deadline(pin, deadline_s, uncontended=decision.uncontended)
        self.telemetry.extend(now_s, pin, "re-decided")
        return True

    def _lower_policy_ttl(
        self, pin: Pin, facts: TurnFacts, view: View, now_s: float
    ) -> None:
        """A client's own TTL stands; the part that the policy asked for is less now."""
        decision = self._redecide(facts, now_s - pin.turn.finish_s, view)
        ends_s = now_s + max(0.0, decision.ttl_s)
        self.pins.lower_policy_deadline(pin, ends_s)

    def _view(self, now_s: float) -> View:
        """What a policy may know now."""
        return View(
            self.gaps,
            self.costs,
            self.memoryfulness.eta,
            self.memoryfulness.avg_turns,
            self.holder.pressure(),
            now_s,
            self.tier_knowledge.reload_source,
            self.config.demote == "write-through",
            self.tier_knowledge.keeps,
        )

    def _ask(self, facts: TurnFacts, view: View) -> Decision:
        """The policy's answer.

        A policy that raises or returns NaN or a negative number costs the turn
        its retention and is counted; it never reaches the engine.
        """
        try:
            decision = self.policy.decide(facts, view)
            numbers = (
                decision.ttl_s,
                decision.policy_ttl_s,
                decision.stall_wait_s,
                decision.min_keep_share,
            )
            is_valid = all(number >= 0 for number in numbers)  # False for NaN
        except Exception:  # noqa: BLE001 - policies may be anybody's code
            return self._fault("policy:raised")
        return decision if is_valid else self._fault("policy:nonsense")

    def _fault(self, reason: str) -> Decision:
        self.telemetry.metrics.count("hook_errors", "policy")
        return Decision(0.0, reason)

    # --- pins and caps ---------------------------------------------------

    def _start(
        self,
        program: Program,
        turn: Turn,
        decision: Decision,
        finish: Finish,
        now_s: float,
        rank: Rank,
    ) -> Pin | None:
        """Pin the reusable prefix of a turn, as much of it as the cap leaves.

        Blocks that other pins reference already do not count against the cap.

        Returns:
            The pin, or None when nothing of it fits, or enough others hold all of it.
        """
        kv_blocks = finish.kv_blocks
        keep = reusable_blocks(program, turn, kv_blocks)
        missing = self._missing(finish, keep)
        if missing > 0:
            self.reclaimer.make_room_for_pin(
                program, rank, missing, some_help=finish.divisible
            )
            # Counted anew: those pins may have referenced blocks of this very turn.
            keep -= max(0, self._missing(finish, keep))
        if keep < kv_blocks and not finish.divisible:
            return None
        if keep <= 0 or (finish.count_pins and finish.count_pins(keep) >= MAX_ALIKE):
            return None
        too_many = self.pins.kv_blocks + keep - self._max_references()
        if too_many > 0:
            self.reclaimer.make_room_for_pin(program, rank, too_many, some_help=False)
            if self.pins.kv_blocks + keep > self._max_references():
                return None
        return self.pins.add(
            program,
            turn,
            kv_blocks=keep,
            kv_tokens=finish.kv_tokens * keep // kv_blocks,
            now_s=now_s,
            ttl_s=decision.ttl_s,
            policy_ttl_s=decision.policy_ttl_s,
            rank=rank,
            stall_wait_s=min(decision.stall_wait_s, MAX_STALL_WAIT_S),
            min_blocks=math.ceil(min(1.0, decision.min_keep_share) * keep),
            uncontended=decision.uncontended,
            yields_to_waiting=decision.yields_to_waiting,
        )

    def _max_references(self) -> int:
        return MAX_SHARING * self.holder.pressure().pool_blocks

    def _missing(self, finish: Finish, keep: int) -> int:
        """Blocks by which pinning the first `keep` would exceed the cap."""
        pressure = self.holder.pressure()
        cap = int(self.config.max_pinned_fraction * pressure.pool_blocks)
        missing = pressure.pinned_blocks + keep - cap
        if missing > 0 and finish.count_unpinned:  # it walks over a long context
            missing -= keep - finish.count_unpinned(keep)
        return missing

    def _client_ttl_excess(self) -> int:
        """Blocks by which client TTLs hold more than their share among several tenants.

        Below 0 while they hold less, and where there is one tenant.

        A pin that no policy asked for costs the others even if none of their requests
        waits: the free part of the pool is their prefix cache.
        """
        held = self.pins.client_ttl_blocks
        if not held or self.num_tenants() <= 1:
            return -1
        return held - self._max_client_ttl_blocks()

    def _max_client_ttl_blocks(self) -> int:
        pool_blocks = self.holder.pressure().pool_blocks
        return int(CLIENT_TTL_SHARE * self.config.max_pinned_fraction * pool_blocks)

    def _expire(self, pin: Pin) -> int:
        return self.reclaimer.turns.end_pin(pin, PinOutcome.EXPIRED)


def reusable_blocks(program: Program, turn: Turn, kv_blocks: int) -> int:
    """Of a turn's blocks, how many its program's next turn is likely to find again."""
    share = program.reuse_share
    if share < PARTIAL_REUSE_BELOW:
        return math.ceil(share * kv_blocks)
    if program.drops_outputs and turn.prompt_fingerprint is not None:
        return math.ceil(
            kv_blocks * turn.prompt_fingerprint.num_hashes / turn.num_hashes
        )
    return kv_blocks


def _by_eta(facts: TurnFacts, view: View) -> Decision:
    """Hold until the announced end if that costs less than it saves.

    The paper's cost model with a known gap (v4 §4.1, P = 1 at the announced end).
    """
    left_s = (facts.tool_eta_s or 0.0) - max(facts.waited_s, 0.0)
    delay_s = view.costs.queueing_delay_s * view.memoryfulness
    benefit_s = delay_s + view.recovery_s(facts)
    if left_s > benefit_s:
        return Decision(0.0, "progress:too-long")
    return Decision(max(left_s, 0.0) + ETA_MARGIN_S, "progress")


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


def _as_json(pin: Pin, now_s: float) -> dict[str, Any]:
    return {
        "ttl_left_s": round(max(0.0, pin.deadline_s - now_s), 3),
        "kv_blocks": pin.kv_blocks,
        "kv_tokens": pin.kv_tokens,
    }
