"""What a flood of pinned sessions costs another tenant, on vLLM's real scheduler.

Virtual time, no model, deterministic. The same requests arrive in every arm, so that
the total load is equal; only what the flooding client says about them differs.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ttlcache.clock import VirtualClock, use_clock
from ttlcache.controller import Controller
from ttlcache_connector.blocks.pinned import PinnedBlocks
from ttlcache_connector.harness import EngineHarness, EngineSpec
from ttlcache_connector.role.scheduler import SchedulerSide

#: How the flooding client behaves: it says that each session is over; it wants every
#: session kept for ever; each session pretends to be another tenant (cache_salt),
#: which a gateway must not let clients choose.
ARMS = ("polite", "flood", "salts")
VICTIM = "good"
FLOODER = "evil"
MAX_STEPS = 5_000_000


@dataclass(frozen=True, slots=True)
class FloodOptions:
    """Sizes. Tokens are KV tokens, times virtual seconds."""

    sessions: int = 10_000
    sessions_a_s: float = 20.0
    session_tokens: int = 240
    programs_a_s: float = 0.5
    """Programs of the tenant that is watched."""
    turns: int = 6
    new_tokens: int = 300
    output_tokens: int = 16
    mean_gap_s: float = 2.0
    num_blocks: int = 1_200
    block_tokens: int = 16
    step_s: float = 0.01
    token_s: float = 1e-4
    """An engine step takes `step_s` and this per token."""
    policy: str = "cachettl"
    seed: int = 0

    @property
    def horizon_s(self) -> float:
        """When the last session arrives."""
        return self.sessions / self.sessions_a_s


@dataclass(frozen=True, slots=True)
class FloodResult:
    """One arm."""

    arm: str
    mean_jct_s: float
    """Of the watched tenant's programs, first request to last token."""
    programs: int
    hit_share: float
    """Of its context tokens, those found in memory; first turns aside."""
    sessions: int
    peak_pinned_blocks: int
    peak_programs: int
    hook_errors: int


@dataclass(slots=True)
class _Agent:
    name: str
    context: list[int]
    gaps_s: list[float]
    began_s: float
    turn: int = 0


def run_arm(arm: str, options: FloodOptions) -> FloodResult:
    """Play one arm to its end.

    Raises:
        RuntimeError: the engine does not get done.
    """
    clock = VirtualClock(1000.0)
    with use_clock(clock):
        return _Arm(arm, options, clock).run()


class _Arm:
    def __init__(self, arm: str, options: FloodOptions, clock: VirtualClock) -> None:
        if arm not in ARMS:
            raise ValueError(f"arm {arm!r}, expected one of {', '.join(ARMS)}")
        self._arm = arm
        self._options = options
        self._clock = clock
        self._engine = EngineHarness(
            EngineSpec(
                num_blocks=options.num_blocks,
                block_tokens=options.block_tokens,
                max_num_seqs=32,
                max_num_batched_tokens=1024,
                extra_config={"policy": options.policy},
            )
        )
        self._order = itertools.count()
        self._due: list[tuple[float, int, Any]] = []
        self._agents: dict[str, _Agent] = {}
        self._jcts_s: list[float] = []
        self._cached: dict[str, int] = {}
        self._hit = self._hittable = 0

    @property
    def _side(self) -> SchedulerSide:
        side = self._engine.connector.side
        assert side is not None
        return side

    @property
    def _controller(self) -> Controller:
        assert self._side.controller is not None
        return self._side.controller

    @property
    def _ledger(self) -> PinnedBlocks:
        assert self._side.ledger is not None
        return self._side.ledger

    def run(self) -> FloodResult:
        options, clock, engine = self._options, self._clock, self._engine
        start_s = clock.now_s()
        for at_s, event in _arrivals(options):
            heapq.heappush(self._due, (start_s + at_s, next(self._order), event))
        controller = self._controller
        peak_pinned = peak_programs = 0
        for _ in range(MAX_STEPS):
            while self._due and self._due[0][0] <= clock.now_s():
                self._send(heapq.heappop(self._due)[2])
            if not engine.scheduler.has_unfinished_requests():
                if not self._due:
                    break
                clock.advance(self._due[0][0] - clock.now_s())
                continue
            tokens = engine.step().total_num_scheduled_tokens
            self._see_hits()
            clock.advance(options.step_s + tokens * options.token_s)
            self._collect()
            pinned = self._ledger.pressure().pinned_blocks
            peak_pinned = max(peak_pinned, pinned)
            peak_programs = max(peak_programs, len(controller.programs))
        else:
            raise RuntimeError(f"not done after {MAX_STEPS} steps")
        return FloodResult(
            arm=self._arm,
            mean_jct_s=statistics.fmean(self._jcts_s),
            programs=len(self._jcts_s),
            hit_share=self._hit / max(1, self._hittable),
            sessions=options.sessions,
            peak_pinned_blocks=peak_pinned,
            peak_programs=peak_programs,
            hook_errors=self._side.faults.total,
        )

    def _send(self, event: int | _Agent) -> None:
        if isinstance(event, _Agent):
            self._send_turn(event)
        else:
            self._send_session(event)

    def _send_turn(self, agent: _Agent) -> None:
        rng = random.Random(f"{agent.name}/{agent.turn}")
        agent.context += [
            rng.randrange(30_000) for _ in range(self._options.new_tokens)
        ]
        agent.turn += 1
        self._agents[agent.name] = agent
        hints: dict[str, Any] = {"program_id": agent.name, "tool": "bash"}
        if agent.turn == self._options.turns:
            hints["is_last_step"] = True
        self._engine.add(
            f"{agent.name}/{agent.turn}",
            agent.context,
            max_tokens=self._options.output_tokens,
            hints=hints,
            cache_salt=VICTIM,
        )

    def _send_session(self, number: int) -> None:
        # An id that a program of the other tenant has, or one of its own.
        name = f"agent-{number % 50}" if number % 3 == 0 else f"session-{number}"
        hints: dict[str, Any] = {"program_id": name, "is_last_step": True}
        if self._arm != "polite":
            hints = {"program_id": name, "ttl": 1e9, "tool": f"tool-{number}"}
        rng = random.Random(number)
        self._engine.add(
            f"session-{number}",
            [rng.randrange(30_000) for _ in range(self._options.session_tokens)],
            max_tokens=1,
            hints=hints,
            cache_salt=f"{FLOODER}-{number}" if self._arm == "salts" else FLOODER,
        )

    def _see_hits(self) -> None:
        requests = self._controller.requests
        for agent in self._agents.values():
            record = requests.get(f"{agent.name}/{agent.turn}")
            if record is not None and record.admitted_s is not None:
                self._cached[record.request_id] = record.cached_tokens

    def _collect(self) -> None:
        finished, self._engine.finished = self._engine.finished, {}
        for request_id, request in finished.items():
            agent = self._agents.pop(request_id.partition("/")[0], None)
            if agent is None:
                continue
            if agent.turn > 1:
                self._hittable += request.num_prompt_tokens - self._options.new_tokens
                self._hit += self._cached.pop(request_id, 0)
            agent.context = list(request.all_token_ids)
            if agent.turn == self._options.turns:
                self._jcts_s.append(self._clock.now_s() - agent.began_s)
                continue
            at_s = self._clock.now_s() + agent.gaps_s[agent.turn - 1]
            heapq.heappush(self._due, (at_s, next(self._order), agent))


def _arrivals(options: FloodOptions) -> Iterator[tuple[float, int | _Agent]]:
    """Seconds from the start, and who comes: a session's number, or an agent."""
    rng = random.Random(options.seed)
    for number in range(options.sessions):
        yield number / options.sessions_a_s, number
    for number in range(int(options.horizon_s * options.programs_a_s)):
        at_s = number / options.programs_a_s
        gaps_s = [
            rng.expovariate(1 / options.mean_gap_s) for _ in range(options.turns - 1)
        ]
        yield at_s, _Agent(f"agent-{number}", [], gaps_s, 1000.0 + at_s)
