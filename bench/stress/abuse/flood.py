"""What a flood of pinned sessions costs another tenant, on vLLM's real scheduler.

Virtual time, no model, deterministic. The same requests arrive in every arm, so that
the total load is equal; only what the flooding client says about them differs.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from dataclasses import dataclass, field
from typing import Any

from bench.command import one_of
from bench.sim.harness import EngineHarness, EngineSpec
from ttlcache.clock import VirtualClock, use_clock

#: How the flooding client behaves: it says that each session is over; it wants every
#: session kept for ever; each session pretends to be another tenant (cache_salt),
#: which a gateway must not let clients choose.
ARMS = ("polite", "flood", "salts")
SESSION_TOKENS = 240
SESSIONS_A_S, PROGRAMS_A_S = 20.0, 0.5
VOCAB = 30_000
MAX_STEPS = 5_000_000
#: Programs of the tenant that is watched.
TURNS, NEW_TOKENS, OUTPUT_TOKENS, MEAN_GAP_S = 6, 300, 16, 2.0
#: An engine step takes so many seconds, and so many per token.
STEP_S, TOKEN_S = 0.01, 1e-4


@dataclass(frozen=True, slots=True)
class Waits:
    """What the tenant that is watched went through."""

    jcts_s: tuple[float, ...]
    """First request to last token."""
    hook_errors: int
    hit_share: float
    """Of their context tokens, those found in memory; first turns aside."""
    peak_pinned_blocks: int

    @property
    def programs(self) -> int:
        return len(self.jcts_s)

    @property
    def mean_jct_s(self) -> float:
        return statistics.fmean(self.jcts_s)


def run_arm(arm: str, sessions: int, policy: str = "cachettl") -> Waits:
    """What the tenant that is watched went through in one arm.

    Args:
        sessions: of the flooding client; programs of the other tenant come meanwhile.

    Raises:
        RuntimeError: the engine does not get done.
    """
    one_of("arm", arm, ARMS)
    clock = VirtualClock(1_000.0)
    with use_clock(clock):
        return _Flood(arm, sessions, policy, clock).run()


@dataclass(slots=True)
class _Agent:
    name: str
    gaps_s: list[float]
    began_s: float
    context: list[int] = field(default_factory=list)
    turn: int = 0


class _Flood:
    def __init__(
        self, arm: str, sessions: int, policy: str, clock: VirtualClock
    ) -> None:
        self._arm, self._clock = arm, clock
        self._engine = EngineHarness(
            EngineSpec(
                num_blocks=1_200,
                max_num_seqs=32,
                max_num_batched_tokens=1_024,
                extra_config={"policy": policy},
            )
        )
        role = self._engine.connector.scheduler_role
        assert role is not None
        self._parts = role.parts
        self._order = itertools.count()
        self._due: list[tuple[float, int, _Agent | int]] = []  # int: a session
        self._sent: dict[str, _Agent] = {}
        self._jcts_s: list[float] = []
        self._hit = self._hittable = 0
        self._agents = int(sessions / SESSIONS_A_S * PROGRAMS_A_S)
        self._arrive(sessions)

    def run(self) -> Waits:
        clock, engine, peak_pinned = self._clock, self._engine, 0
        for _ in range(MAX_STEPS):
            while self._due and self._due[0][0] <= clock.now_s():
                self._send(heapq.heappop(self._due)[2])
            if len(self._jcts_s) == self._agents:
                break
            if not engine.scheduler.has_unfinished_requests():
                clock.advance(self._due[0][0] - clock.now_s())
                continue
            output = engine.step()
            for new in output.scheduled_new_reqs:
                self._admitted(new.req_id, new.num_computed_tokens)
            pressure = self._parts.holder.pressure()
            peak_pinned = max(peak_pinned, pressure.pinned_blocks)
            clock.advance(STEP_S + output.total_num_scheduled_tokens * TOKEN_S)
            self._collect()
        else:
            raise RuntimeError(f"not done after {MAX_STEPS} steps")
        return Waits(
            tuple(self._jcts_s),
            self._parts.faults.total,
            self._hit / max(1, self._hittable),
            peak_pinned,
        )

    def _arrive(self, sessions: int) -> None:
        start_s, rng = self._clock.now_s() + 10.0, random.Random(0)
        for number in range(self._agents):
            gaps_s = [rng.expovariate(1 / MEAN_GAP_S) for _ in range(TURNS - 1)]
            began_s = start_s + number / PROGRAMS_A_S
            self._push(began_s, _Agent(f"agent-{number}", gaps_s, began_s))
        for number in range(sessions):
            self._push(start_s + number / SESSIONS_A_S, number)

    def _push(self, at_s: float, what: _Agent | int) -> None:
        heapq.heappush(self._due, (at_s, next(self._order), what))

    def _send(self, what: _Agent | int) -> None:
        if isinstance(what, _Agent):
            self._send_turn(what)
        else:
            self._send_session(what)

    def _send_turn(self, agent: _Agent) -> None:
        rng = random.Random(f"{agent.name}/{agent.turn}")
        agent.context += [rng.randrange(VOCAB) for _ in range(NEW_TOKENS)]
        agent.turn += 1
        hints: dict[str, Any] = {"program_id": agent.name, "tool": "bash"}
        if agent.turn == TURNS:
            hints["is_last_step"] = True
        name = f"{agent.name}/{agent.turn}"
        self._sent[name] = agent
        self._engine.add(
            name,
            agent.context,
            max_tokens=OUTPUT_TOKENS,
            hints=hints,
            cache_salt="agents",
        )

    def _send_session(self, number: int) -> None:
        # An id that a program of the other tenant has, or one of its own.
        name = f"agent-{number % 50}" if number % 3 == 0 else f"session-{number}"
        hints: dict[str, Any] = {"program_id": name, "is_last_step": True}
        if self._arm != "polite":
            hints = {"program_id": name, "ttl": 1e9, "tool": f"tool-{number}"}
        rng = random.Random(number)
        self._engine.add(
            f"session-{number}/1",
            [rng.randrange(VOCAB) for _ in range(SESSION_TOKENS)],
            max_tokens=1,
            hints=hints,
            cache_salt=f"clients-{number}" if self._arm == "salts" else "clients",
        )

    def _admitted(self, request_id: str, cached_tokens: int) -> None:
        agent = self._sent.get(request_id)
        if agent is not None and agent.turn > 1:
            self._hit += cached_tokens
            self._hittable += len(agent.context) - NEW_TOKENS

    def _collect(self) -> None:
        finished, self._engine.finished = self._engine.finished, {}
        now_s = self._clock.now_s()
        for request_id, request in finished.items():
            agent = self._sent.pop(request_id, None)
            if agent is None:
                continue
            agent.context = list(request.all_token_ids)
            if agent.turn == TURNS:
                self._jcts_s.append(now_s - agent.began_s)
            else:
                self._push(now_s + agent.gaps_s[agent.turn - 1], agent)
