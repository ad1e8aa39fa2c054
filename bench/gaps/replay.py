"""Replays recorded gaps through the real controller, in time order.

The controller, its gap history, cost model and policy see each gap when it ends and
not before. Requests are served as recorded, whatever was evicted: no queue forms,
so every policy faces the same gaps. Memory is endless; what it costs is the stated
price. Decisions at a deadline, the caps and the end of silent programs are the
controller's own.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.gaps.costs import CostSetting
from bench.gaps.traces import GapProgram
from ttlcache.clock import VirtualClock
from ttlcache.config import load_config
from ttlcache.controller import Controller
from ttlcache.types import (
    Arrival,
    Finish,
    Hints,
    PinOutcome,
    Pressure,
    ReleaseMode,
    Shrunk,
)

BLOCK_TOKENS = 16
#: An engine step follows each deadline after this many seconds; a return at the
#: very deadline is in time.
STEP_S = 1e-6
_ARRIVE, _FINISH, _TICK = range(3)  # order of events at one time


@dataclass(frozen=True, slots=True)
class Arm:
    """A policy with its options, under the name that tables give it."""

    name: str
    policy: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Outcome:
    """One decided turn and what became of it.

    gap_s: seconds to the next turn; inf: nobody came back.
    benefit_s: B, seconds lost if the next turn comes and finds nothing.
    held_s: seconds pinned, prolongations included. ttl_s: the first decision.
    """

    gap_s: float
    benefit_s: float
    ttl_s: float = 0.0
    reason: str = ""
    held_s: float = 0.0
    in_time: bool = False

    def cost_s(self, price: float) -> float:
        missed = math.isfinite(self.gap_s) and not self.in_time
        return price * self.held_s + (self.benefit_s if missed else 0.0)


def replay_gaps(
    programs: Sequence[GapProgram], setting: CostSetting, arm: Arm
) -> list[Outcome]:
    """The outcome of every decided turn, in the order in which they finished."""
    return _Replay(programs, setting, arm).run()


class _NullHolder:
    """Counts seconds: a `BlockHolder` without blocks."""

    def __init__(self, clock: VirtualClock, pressure: Pressure) -> None:
        self._clock = clock
        self._pressure = pressure
        self._held: dict[int, tuple[Outcome, float]] = {}
        self.finishing_blocks = 0  # of the turn that is decided: still its request's

    def hold(self, pin_id: int, outcome: Outcome) -> None:
        self._held[pin_id] = outcome, self._clock.now_s()

    def plain_hit_tokens(self, pin_id: int, behind_blocks: int) -> float:
        return math.inf

    def release(self, pin_id: int, outcome: PinOutcome, mode: ReleaseMode) -> int:
        turn, since_s = self._held.pop(pin_id)
        turn.held_s = self._clock.now_s() - since_s
        return 0

    def shrink(self, pin_id: int, drop_blocks: int, mode: ReleaseMode) -> Shrunk | None:
        return None

    def is_freeable(self, pin_id: int) -> bool:
        return True

    def count_freeable(self, pin_ids: Iterable[int], enough: int) -> int:
        return enough

    def pressure(self) -> Pressure:
        free_blocks = self._pressure.free_blocks - self.finishing_blocks
        return self._pressure._replace(free_blocks=free_blocks)


class _Replay:
    def __init__(
        self, programs: Sequence[GapProgram], setting: CostSetting, arm: Arm
    ) -> None:
        self._programs = programs
        self._clock = VirtualClock()
        self._holder = _NullHolder(self._clock, setting.pressure(BLOCK_TOKENS))
        self._costs = setting.model()
        config = load_config(
            {"policy": arm.policy, "policy_options": dict(arm.options)}
        )
        self._idle_s = config.program_idle_s
        self._controller = Controller(
            config,
            self._clock,
            self._holder,
            BLOCK_TOKENS,
            costs=self._costs,
        )
        self._outcomes: list[Outcome] = []
        self._pending: dict[int, Outcome] = {}  # program's number -> its open gap
        self._events: list[tuple[float, int, int, int]] = []

    def run(self) -> list[Outcome]:
        for number, program in enumerate(self._programs):
            self._push(program.arrival_s, _ARRIVE, number, 0)
        while self._events:
            at_s, kind, number, index = heapq.heappop(self._events)
            self._step_until(at_s)
            self._clock.set(at_s)
            if kind == _TICK:
                self._controller.tick()
            elif kind == _ARRIVE:
                self._arrive(number, index)
            else:
                self._finish(number, index)
        self._step_until(math.inf)
        return self._outcomes

    def _push(self, at_s: float, kind: int, number: int, index: int) -> None:
        heapq.heappush(self._events, (at_s, kind, number, index))

    def _step_until(self, until_s: float) -> None:
        """An engine step after each deadline before `until_s`."""
        while (deadline_s := self._controller.pins.next_deadline_s()) is not None:
            if deadline_s + STEP_S > until_s:
                return
            self._clock.set(deadline_s + STEP_S)
            self._controller.tick()

    def _arrive(self, number: int, index: int) -> None:
        program = self._programs[number]
        turn = program.turns[index]
        request_id = f"{number}/{index}"
        record = self._controller.arrive(
            Arrival(
                request_id=request_id,
                num_tokens=turn.prompt_tokens,
                hashes=(),
                tokens=lambda start, stop: (),
                hints=Hints(program_id=program.program_id),
            )
        )
        outcome = self._pending.pop(number, None)
        if outcome is not None:
            outcome.in_time = record.pin_id is not None
        hit = outcome is not None and outcome.in_time
        self._controller.on_allocated(request_id, record.reusable_tokens if hit else 0)
        self._push(self._clock.now_s() + turn.llm_s, _FINISH, number, index)

    def _finish(self, number: int, index: int) -> None:
        turn = self._programs[number].turns[index]
        request_id = f"{number}/{index}"
        program = self._controller.requests[request_id].program
        is_known = not math.isnan(turn.gap_s)
        num_tokens = turn.prompt_tokens + turn.output_tokens
        kv_blocks = -(-num_tokens // BLOCK_TOKENS)
        self._holder.finishing_blocks = kv_blocks
        decision, order = self._controller.finish(
            Finish(
                request_id=request_id,
                completed=is_known,
                num_tokens=num_tokens,
                prompt_tokens=turn.prompt_tokens,
                hashes=(),
                tokens=lambda start, stop: (),
                kv_blocks=kv_blocks,
                kv_tokens=num_tokens,
                count_unpinned=lambda count: 0,
                detect=lambda: turn.key,
            )
        )
        self._holder.finishing_blocks = 0
        if is_known and not program.ended:
            opened = program.open_turns[-1]
            benefit_s = self._costs.benefit_s(opened.context_tokens)
            outcome = Outcome(turn.gap_s, benefit_s)
            self._outcomes.append(outcome)
            if decision is not None:
                outcome.ttl_s = decision.ttl_s
                outcome.reason = decision.reason
            if order is not None:
                self._holder.hold(order.pin_id, outcome)
            self._pending[number] = outcome
        now_s = self._clock.now_s()
        if turn.gap_s > self._idle_s:
            # Steps go on in a silence: the program is forgotten on the way.
            self._push(now_s + self._idle_s + STEP_S, _TICK, number, index)
        if not math.isinf(turn.gap_s):
            # An unknown gap was not opened: the next request may come at once.
            after_s = turn.gap_s if is_known else 0.0
            self._push(now_s + after_s, _ARRIVE, number, index + 1)
