"""What happened to whom: one method per event of a program's life.

Each counts what there is to count, and writes the event to the recorder if there is
one. Programs appear there under the ids that clients gave them; prompts, outputs and
cache salts never appear.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ttlcache.programs.model import wait_kind
from ttlcache.programs.table import bounded
from ttlcache.telemetry.metrics import MetricsBuffer
from ttlcache.telemetry.recorder import Recorder
from ttlcache.toolcalls.classes import tool_class

if TYPE_CHECKING:
    from ttlcache.policies.base import View
    from ttlcache.programs.continuation import Continuation
    from ttlcache.programs.model import Claim, Pin, Program, RequestRecord
    from ttlcache.types import (
        Arrival,
        Decision,
        Finish,
        GapKey,
        IdentityRule,
        PinOutcome,
        TurnFacts,
    )


class Telemetry:
    """Counts and records what happens; never in anybody's way.

    metrics: what was counted. In the recording "turn" is a number that no two turns of
    a run share.
    """

    def __init__(
        self,
        metrics: MetricsBuffer | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.metrics = metrics if metrics is not None else MetricsBuffer()
        self._recorder = recorder

    @property
    def dropped(self) -> int:
        """Events lost because the disk was too slow or full."""
        return 0 if self._recorder is None else self._recorder.dropped

    def close(self) -> None:
        """Nothing more will come."""
        if self._recorder is not None:
            self._recorder.close()

    def on_arrival(
        self,
        now_s: float,
        record: RequestRecord,
        rule: IdentityRule,
        arrival: Arrival,
        continuation: Continuation,
    ) -> None:
        """A request found its program and the turn that it goes on from."""
        self.metrics.count("turns_identified", rule.value)
        for reason in arrival.hints.rejected:
            self.metrics.count("hints_rejected", reason)
        if arrival.hints.unknown_keys:
            self.metrics.count("hints_rejected", "unknown_key")
        turn, diverged = continuation.turn, record.divergence
        if diverged is not None and diverged.is_sure:
            self.metrics.count("turns_diverged", diverged.cause.value)
        if self._recorder is None:
            return
        self._put(
            now_s,
            "arrive",
            **_turn_of(record),
            # A client may choose it, of any length.
            request=bounded(record.request_id),
            rule=rule.value,
            relation=continuation.relation.value,
            prompt_tokens=arrival.num_tokens,
            follows=None if turn is None else turn.gap_id,
            gap_s=None if turn is None else now_s - turn.finish_s,
            rejected=arrival.hints.rejected,
            diverged=None if diverged is None else diverged.cause,
            diverged_at=None if diverged is None else diverged.at_tokens,
            diverged_from=None if diverged is None else diverged.context_tokens,
        )

    def gap(self, gap_key: GapKey, gap_s: float) -> None:
        """The next turn came: a tool took so long."""
        self.metrics.observe("gap_seconds", gap_s)
        self.metrics.observe("tool_gap_seconds", gap_s, tool_class(gap_key))

    def on_allocated(
        self,
        now_s: float,
        record: RequestRecord,
        cached_tokens: int,
        claim: Claim | None,
        again: bool,
    ) -> None:
        """It got its blocks; again: after a preemption."""
        is_claim = claim is not None and claim.is_real
        if claim is not None:
            end = "saved" if claim.is_real else "savable"
            self.metrics.count(f"prefill_tokens_{end}", by=claim.saved_tokens)
            self.metrics.count(f"prefill_seconds_{end}", by=claim.saved_s)
            if is_claim:
                self.metrics.count("claimed_tokens", by=claim.tokens)
        wait_s = now_s - record.queued_s
        if not again:
            kind = wait_kind(record, cached_tokens, is_claim=is_claim)
            self.metrics.observe("wait_seconds", wait_s, kind)
            if kind == "lost":
                self.metrics.count("evicted_returns")
        if self._recorder is None:
            return
        self._put(
            now_s,
            "admit",
            **_turn_of(record),
            wait_s=wait_s,
            cached_tokens=cached_tokens,
            pin=None if claim is None else claim.pin_id,
            claimed_tokens=0 if claim is None else claim.tokens,
            saved_tokens=0 if claim is None else claim.saved_tokens,
            saved_s=0.0 if claim is None else claim.saved_s,
            memory_wait_s=record.memory_wait_s(now_s),
            refused_for_growth=record.refused_for_growth,
            again=again,
        )

    def on_finished(self, now_s: float, record: RequestRecord, finish: Finish) -> None:
        """It left the engine."""
        if self._recorder is None:
            return
        self._put(
            now_s,
            "finish",
            **_turn_of(record),
            completed=finish.completed,
            prompt_tokens=finish.prompt_tokens,
            tokens=finish.num_tokens,
        )

    def decide(
        self,
        now_s: float,
        record: RequestRecord,
        facts: TurnFacts,
        decision: Decision,
        view: View,
    ) -> None:
        """The policy answered."""
        self.metrics.observe("ttl_seconds", decision.ttl_s)
        if self._recorder is None:
            return
        pressure = view.pressure
        self._put(
            now_s,
            "decide",
            program=facts.program_id,
            turn=record.seq,
            tool=str(facts.gap_key),
            ttl_s=_finite(decision.ttl_s),
            reason=decision.reason,
            # A copy: infinite values are no JSON.
            inputs={str(name): _finite(v) for name, v in decision.inputs.items()},
            kv_blocks=facts.kv_blocks,
            recovery_s=view.recovery_s(facts),
            records=view.gaps.count(facts.gap_key),
            free_blocks=pressure.free_blocks,
            pinned_blocks=pressure.pinned_blocks,
            pool_blocks=pressure.pool_blocks,
            running=pressure.num_running,
            waiting=pressure.num_waiting,
        )

    def pin(self, now_s: float, pin: Pin) -> None:
        """Blocks are referenced from now on."""
        self.metrics.count("pins_started")
        if self._recorder is None:
            return
        ttl_s = pin.deadline_s - now_s
        self._put(now_s, "pin", **_pin_of(pin), kv_blocks=pin.kv_blocks, ttl_s=ttl_s)

    def extend(self, now_s: float, pin: Pin, why: str) -> None:
        """The deadline moved."""
        ttl_s = pin.deadline_s - now_s
        self._put(now_s, "extend", **_pin_of(pin), ttl_s=ttl_s, why=why)

    def shrink(self, now_s: float, pin: Pin) -> None:
        """The tail of a pin was given back; its new size."""
        self._put(now_s, "shrink", **_pin_of(pin), kv_blocks=pin.kv_blocks)

    def unpin(self, now_s: float, pin: Pin, outcome: PinOutcome) -> None:
        """A pin ended; `count_outcome` counts it, maybe later."""
        self.metrics.observe("pinned_seconds", max(0.0, now_s - pin.created_s))
        if self._recorder is not None:
            self._put(now_s, "unpin", **_pin_of(pin), outcome=outcome.value)

    def count_outcome(self, gap_key: GapKey, outcome: PinOutcome) -> None:
        """It is known how the pin of a turn with that gap ended."""
        self.metrics.count("pins", outcome.value)
        self.metrics.count("pins_by_tool", f"{tool_class(gap_key)}/{outcome.value}")

    def on_program_end(self, now_s: float, program: Program, how: str) -> None:
        """A program is over."""
        self.metrics.count("programs_ended", how)
        turns = program.turns_finished
        self._put(now_s, "end", program=program.program_id, how=how, turns=turns)

    def _put(self, now_s: float, kind: str, **fields: Any) -> None:
        if self._recorder is not None:
            self._recorder.put(now_s, kind, fields)


def _turn_of(record: RequestRecord) -> dict[str, Any]:
    return {"program": record.program.program_id, "turn": record.seq}


def _pin_of(pin: Pin) -> dict[str, Any]:
    program_id = pin.program.program_id
    return {"program": program_id, "turn": pin.turn.gap_id, "pin": pin.pin_id}


def _finite(value: object) -> Any:
    """A number as JSON has it, anything else as short text: policies are anybody's."""
    if isinstance(value, int | float) and -1e300 < value < 1e300:
        return value
    return str(value)[:64]
