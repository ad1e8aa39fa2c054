"""What happened to whom: one method per event of a program's life.

The controller calls these; `Journal` writes them to a recorder, `NullJournal` does
nothing. Programs appear under the ids that clients gave them; prompts, outputs and
cache salts never appear.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ttlcache.programs.table import bounded
from ttlcache.telemetry.recorder import Recorder

if TYPE_CHECKING:
    from ttlcache.policies.base import View
    from ttlcache.programs.continuation import Continuation
    from ttlcache.programs.model import Claim, Pin, Program, RequestRecord, Turn
    from ttlcache.types import (
        Arrival,
        Decision,
        Finish,
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


class NullJournal:
    """Nobody records."""

    @property
    def dropped(self) -> int:
        """Events lost because the disk was too slow or full."""
        return 0

    def arrive(
        self,
        now_s: float,
        record: RequestRecord,
        rule: IdentityRule,
        arrival: Arrival,
        continuation: Continuation,
    ) -> None:
        """A request found its program and the turn that it goes on from."""

    def admit(
        self,
        now_s: float,
        record: RequestRecord,
        cached_tokens: int,
        claim: Claim | None,
        again: bool,
    ) -> None:
        """It got its blocks."""

    def first_token(
        self, now_s: float, record: RequestRecord, prompt_tokens: int
    ) -> None:
        """Its prompt is computed."""

    def finish(self, now_s: float, record: RequestRecord, finish: Finish) -> None:
        """It left the engine."""

    def decide(
        self,
        now_s: float,
        record: RequestRecord,
        facts: TurnFacts,
        decision: Decision,
        view: View,
    ) -> None:
        """The policy answered."""

    def pin(self, now_s: float, pin: Pin) -> None:
        """Blocks are held from now on."""

    def extend(self, now_s: float, pin: Pin, why: str) -> None:
        """The deadline moved."""

    def shrink(self, now_s: float, pin: Pin) -> None:
        """The tail of a pin was given back; its new size."""

    def unpin(self, now_s: float, pin: Pin, outcome: PinOutcome) -> None:
        """A pin ended."""

    def end(self, now_s: float, program: Program, how: str) -> None:
        """A program is over."""

    def close(self) -> None:
        """Nothing more will come."""


class Journal(NullJournal):
    """Every event into a `Recorder`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._put = recorder.put

    @property
    def dropped(self) -> int:
        return self._recorder.dropped

    def arrive(
        self,
        now_s: float,
        record: RequestRecord,
        rule: IdentityRule,
        arrival: Arrival,
        continuation: Continuation,
    ) -> None:
        turn, diverged = continuation.turn, record.divergence
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

    def admit(
        self,
        now_s: float,
        record: RequestRecord,
        cached_tokens: int,
        claim: Claim | None,
        again: bool,
    ) -> None:
        claimed = (None, 0, 0, 0.0) if claim is None else claim
        self._put(
            now_s,
            "admit",
            (
                record.program.program_id,
                record.seq,
                now_s - record.queued_s,
                cached_tokens,
                *claimed,
                record.memory_wait_s(now_s),
                again,
            ),
        )

    def first_token(
        self, now_s: float, record: RequestRecord, prompt_tokens: int
    ) -> None:
        computed = prompt_tokens - record.cached_tokens
        self._put(
            now_s,
            "first_token",
            (record.program.program_id, record.seq, record.prefill_s, computed),
        )

    def finish(self, now_s: float, record: RequestRecord, finish: Finish) -> None:
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
        size = (pin.kv_blocks, pin.kv_tokens, pin.deadline_s - now_s)
        self._put(now_s, "pin", (*_of(pin), *size))

    def extend(self, now_s: float, pin: Pin, why: str) -> None:
        self._put(now_s, "extend", (*_of(pin), pin.deadline_s - now_s, why))

    def shrink(self, now_s: float, pin: Pin) -> None:
        self._put(now_s, "shrink", (*_of(pin), pin.kv_blocks, pin.kv_tokens))

    def unpin(self, now_s: float, pin: Pin, outcome: PinOutcome) -> None:
        lived_s = max(0.0, now_s - pin.created_s)
        self._put(now_s, "unpin", (*_of(pin), outcome.value, lived_s, pin.kv_blocks))

    def end(self, now_s: float, program: Program, how: str) -> None:
        values = (program.program_id, how, program.turns_finished)
        self._put(now_s, "end", values)

    def close(self) -> None:
        self._recorder.close()


def _of(pin: Pin) -> tuple[str, int, int]:
    turn: Turn = pin.turn
    return pin.program.program_id, turn.token, pin.pin_id


def _finite(value: object) -> Any:
    """A number as JSON has it, anything else as short text: policies are anybody's."""
    if isinstance(value, int | float) and -1e300 < value < 1e300:
        return value
    return str(value)[:64]
