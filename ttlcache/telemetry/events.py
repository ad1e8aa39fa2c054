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
    from ttlcache.programs.model import Claim, Pin, Program, RequestRecord, Turn
    from ttlcache.types import (
        Arrival,
        Decision,
        Finish,
        GapKey,
        IdentityRule,
        PinOutcome,
        TurnFacts,
    )

#: Kind of event -> its fields. "turn" is a number that no two turns of a run share.
EVENTS: dict[str, tuple[str, ...]] = {
    "arrive": (
        *("program", "turn", "request", "rule", "relation", "prompt_tokens"),
        *("follows", "gap_s", "context_tokens", "reusable_tokens", "pin", "rejected"),
        *("diverged", "diverged_at", "diverged_from"),
    ),
    "admit": (
        *("program", "turn", "wait_s", "cached_tokens", "pin", "claimed_tokens"),
        *("saved_tokens", "saved_s", "memory_wait_s", "again"),
    ),
    "first_token": ("program", "turn", "prefill_s", "computed_tokens"),
    "finish": ("program", "turn", "completed", "prompt_tokens", "tokens"),
    "decide": (
        *("program", "turn", "tool", "ttl_s", "reason", "inputs", "context_tokens"),
        *("kv_blocks", "recovery_s", "records", "free_blocks", "pinned_blocks"),
        *("pool_blocks", "running", "waiting"),
    ),
    "pin": ("program", "turn", "pin", "kv_blocks", "kv_tokens", "ttl_s"),
    "extend": ("program", "turn", "pin", "ttl_s", "why"),
    "shrink": ("program", "turn", "pin", "kv_blocks", "kv_tokens"),
    "unpin": ("program", "turn", "pin", "outcome", "lived_s", "kv_blocks"),
    "end": ("program", "how", "turns"),
}


class Telemetry:
    """Counts and records what happens; never in anybody's way.

    metrics: what was counted.
    """

    def __init__(
        self,
        metrics: MetricsBuffer | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.metrics = metrics if metrics is not None else MetricsBuffer()
        self._recorder = recorder
        self._put = None if recorder is None else recorder.put

    @property
    def dropped(self) -> int:
        """Events lost because the disk was too slow or full."""
        return 0 if self._recorder is None else self._recorder.dropped

    def close(self) -> None:
        """Nothing more will come."""
        if self._recorder is not None:
            self._recorder.close()

    def arrive(
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
        turn, diverged = continuation.turn, record.divergence
        if diverged is not None and diverged.is_sure:
            self.metrics.count("turns_diverged", diverged.cause.value)
        if self._put is None:
            return
        self._put(
            now_s,
            "arrive",
            (
                record.program.program_id,
                record.seq,
                # A client may choose it, of any length.
                bounded(record.request_id),
                rule.value,
                continuation.relation.value,
                arrival.num_tokens,
                None if turn is None else turn.token,
                None if turn is None else now_s - turn.finish_s,
                None if turn is None else turn.context_tokens,
                record.reusable_tokens,
                record.pin_id,
                arrival.hints.rejected,
                *((None,) * 3 if diverged is None else diverged[:3]),
            ),
        )

    def program_started(self) -> None:
        """A program was seen for the first time."""
        self.metrics.count("programs_started")

    def gap(self, gap_key: GapKey, gap_s: float) -> None:
        """The next turn came: a tool took so long."""
        self.metrics.observe("gap_seconds", gap_s)
        self.metrics.observe("tool_gap_seconds", gap_s, tool_class(gap_key))

    def admit(
        self,
        now_s: float,
        record: RequestRecord,
        cached_tokens: int,
        claim: Claim | None,
        again: bool,
    ) -> None:
        """It got its blocks; again: after a preemption."""
        if claim is not None:
            self.metrics.count("claimed_tokens", by=claim.tokens)
            self.metrics.count("prefill_tokens_saved", by=claim.saved_tokens)
        wait_s = now_s - record.queued_s
        if not again:
            kind = wait_kind(record, cached_tokens, is_claim=claim is not None)
            self.metrics.observe("wait_seconds", wait_s, kind)
            if kind == "lost":
                self.metrics.count("evicted_returns")
        if self._put is None:
            return
        claimed = (None, 0, 0, 0.0) if claim is None else claim
        self._put(
            now_s,
            "admit",
            (
                record.program.program_id,
                record.seq,
                wait_s,
                cached_tokens,
                *claimed,
                record.memory_wait_s(now_s),
                again,
            ),
        )

    def first_token(
        self, now_s: float, record: RequestRecord, prompt_tokens: int
    ) -> None:
        """Its prompt is computed."""
        if self._put is None:
            return
        computed = prompt_tokens - record.cached_tokens
        self._put(
            now_s,
            "first_token",
            (record.program.program_id, record.seq, record.prefill_s, computed),
        )

    def reload(self, source: str | None, tokens: int, seconds: float) -> None:
        """A part of a prompt came back; source: None where the tier is not known."""
        self.metrics.count("reloads", source or "unknown")
        self.metrics.count("reloaded_tokens", source or "unknown", by=tokens)
        self.metrics.observe("reload_seconds", seconds)

    def finish(self, now_s: float, record: RequestRecord, finish: Finish) -> None:
        """It left the engine."""
        if self._put is None:
            return
        self._put(
            now_s,
            "finish",
            (
                record.program.program_id,
                record.seq,
                finish.completed,
                finish.prompt_tokens,
                finish.num_tokens,
            ),
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
        if self._put is None:
            return
        pressure = view.pressure
        self._put(
            now_s,
            "decide",
            (
                facts.program_id,
                record.seq,
                str(facts.gap_key),
                _finite(decision.ttl_s),
                decision.reason,
                # A copy: infinite values are no JSON.
                {str(name): _finite(v) for name, v in decision.inputs.items()},
                facts.context_tokens,
                facts.kv_blocks,
                view.recovery_s(facts),
                view.gaps.count(facts.gap_key),
                pressure.free_blocks,
                pressure.pinned_blocks,
                pressure.pool_blocks,
                pressure.num_running,
                pressure.num_waiting,
            ),
        )

    def pin(self, now_s: float, pin: Pin) -> None:
        """Blocks are referenced from now on."""
        self.metrics.count("pins_started")
        if self._put is None:
            return
        size = (pin.kv_blocks, pin.kv_tokens, pin.deadline_s - now_s)
        self._put(now_s, "pin", (*_of(pin), *size))

    def extend(self, now_s: float, pin: Pin, why: str) -> None:
        """The deadline moved."""
        if self._put is not None:
            self._put(now_s, "extend", (*_of(pin), pin.deadline_s - now_s, why))

    def shrink(self, now_s: float, pin: Pin) -> None:
        """The tail of a pin was given back; its new size."""
        if self._put is not None:
            self._put(now_s, "shrink", (*_of(pin), pin.kv_blocks, pin.kv_tokens))

    def unpin(self, now_s: float, pin: Pin, outcome: PinOutcome) -> None:
        """A pin ended."""
        lived_s = max(0.0, now_s - pin.created_s)
        kind = tool_class(pin.turn.gap_key)
        self.metrics.count("pins", outcome.value)
        self.metrics.count("pins_by_tool", f"{kind}/{outcome.value}")
        self.metrics.observe("pinned_seconds", lived_s)
        if self._put is None:
            return
        self._put(now_s, "unpin", (*_of(pin), outcome.value, lived_s, pin.kv_blocks))

    def end(self, now_s: float, program: Program, how: str) -> None:
        """A program is over."""
        self.metrics.count("programs_ended", how)
        if self._put is not None:
            values = (program.program_id, how, program.turns_finished)
            self._put(now_s, "end", values)


def _of(pin: Pin) -> tuple[str, int, int]:
    turn: Turn = pin.turn
    return pin.program.program_id, turn.token, pin.pin_id


def _finite(value: object) -> Any:
    """A number as JSON has it, anything else as short text: policies are anybody's."""
    if isinstance(value, int | float) and -1e300 < value < 1e300:
        return value
    return str(value)[:64]
