"""From a finished turn to a pin: ask the policy, apply the caps, make room."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ttlcache.config import TTLCacheConfig
from ttlcache.policies.base import Policy, View
from ttlcache.programs.model import Pin, Program, Turn
from ttlcache.retention.pins import PinTable
from ttlcache.retention.reclaim import Reclaimer
from ttlcache.telemetry.metrics import MetricsBuffer
from ttlcache.types import BlockHolder, Decision, Finish, Rank, TurnFacts

#: Below this learnt share only the part that the program reuses is pinned.
PARTIAL_REUSE_BELOW = 0.9
#: Of the pinned cap, what pins that outlive the policy's TTL may hold together where
#: there is more than one tenant.
CLIENT_TTL_SHARE = 0.25
#: Seconds for the result to travel after a tool's announced end.
ETA_MARGIN_S = 1.0
#: An engine with nothing to run never waits longer than this for a pin's next turn.
MAX_STALL_WAIT_S = 60.0


@dataclass(slots=True)
class Retention:
    """Decides TTLs within the caps and starts pins."""

    config: TTLCacheConfig
    policy: Policy
    pins: PinTable
    holder: BlockHolder
    reclaimer: Reclaimer
    metrics: MetricsBuffer
    num_tenants: Callable[[], int] = lambda: 1

    def decide(self, facts: TurnFacts, view: View) -> Decision:
        """The policy's answer, or the client's own TTL, both within `max_ttl_s`.

        A policy that raises or returns NaN or a negative number costs the turn
        its retention and is counted; it never reaches the engine.
        """
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

    def make_room_for_others(self) -> None:
        """A program came: while its tenant was away, client TTLs may have taken all."""
        if self._client_ttl_excess() > 0:
            self.reclaimer.trim_client_ttls(self._max_client_ttl_blocks())

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

    def prolong(self, facts: TurnFacts, waited_s: float, view: View) -> Decision:
        """For how long to go on holding a turn whose gap has lasted `waited_s`.

        All in all never longer than `max_ttl_s`; a TTL below 0 says so.
        """
        decision = self._ask(facts._replace(waited_s=waited_s), view)
        left_s = self.config.max_ttl_s - waited_s
        return decision._replace(ttl_s=min(decision.ttl_s, left_s))

    def replan(self, facts: TurnFacts, waited_s: float, view: View) -> float:
        """Seconds to go on holding a turn whose tool has just told how long it needs.

        Asked of the policy if it reads `tool_eta_s`. Otherwise the paper's own cost
        model with a known gap (v4 §4.1, P = 1 at the announced end) answers.
        """
        facts = facts._replace(waited_s=waited_s)
        known = self._ask if self.policy.reads_eta else _by_eta
        longest_s = self.config.max_ttl_s
        return min(known(facts, view).ttl_s, longest_s - waited_s)

    def start(
        self,
        program: Program,
        turn: Turn,
        decision: Decision,
        finish: Finish,
        now_s: float,
        rank: Rank,
    ) -> Pin | None:
        """Pin the reusable prefix of a turn, as much of it as the cap leaves.

        Blocks that other pins hold already do not count against the cap.

        Returns:
            The pin, or None when nothing of it fits.
        """
        kv_blocks = finish.kv_blocks
        keep = reusable_blocks(program, kv_blocks)
        missing = self._missing(finish, keep)
        if missing > 0:
            self.reclaimer.unpin_for(program, rank, missing, some_help=finish.divisible)
            # Counted anew: those pins may have held blocks of this very turn.
            keep -= max(0, self._missing(finish, keep))
        if keep < kv_blocks and not finish.divisible:
            return None
        if keep <= 0:
            return None
        self.metrics.count("pins_started")
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
            provisional=decision.provisional,
        )

    def _ask(self, facts: TurnFacts, view: View) -> Decision:
        try:
            decision = self.policy.decide(facts, view)
            told = (
                decision.ttl_s,
                decision.policy_ttl_s,
                decision.stall_wait_s,
                decision.min_keep_share,
            )
            is_valid = all(number >= 0 for number in told)  # False for NaN
        except Exception:  # noqa: BLE001 - policies may be anybody's code
            return self._fault("policy:raised")
        return decision if is_valid else self._fault("policy:nonsense")

    def _fault(self, reason: str) -> Decision:
        self.metrics.count("hook_errors", "policy")
        return Decision(0.0, reason)

    def _missing(self, finish: Finish, keep: int) -> int:
        """Blocks by which pinning the first `keep` would exceed the cap."""
        pressure = self.holder.pressure()
        cap = int(self.config.max_pinned_fraction * pressure.pool_blocks)
        unpinned = finish.count_unpinned(keep) if finish.count_unpinned else keep
        return pressure.pinned_blocks + unpinned - cap


def reusable_blocks(program: Program, kv_blocks: int) -> int:
    """Of a turn's blocks, how many its program's next turn is likely to find again."""
    if program.reuse_share >= PARTIAL_REUSE_BELOW:
        return kv_blocks
    return math.ceil(program.reuse_share * kv_blocks)


def _by_eta(facts: TurnFacts, view: View) -> Decision:
    """Hold until the announced end if that costs less than it saves."""
    left_s = (facts.tool_eta_s or 0.0) - max(facts.waited_s, 0.0)
    benefit_s = view.costs.queueing_delay_s * view.memoryfulness + view.recovery_s(
        facts
    )
    if left_s > benefit_s:
        return Decision(0.0, "progress:too-long")
    return Decision(max(left_s, 0.0) + ETA_MARGIN_S, "progress")
