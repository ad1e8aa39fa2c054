"""Agents that behave, beside clients that do not, on vLLM's real scheduler.

Virtual time, no model, deterministic. The same agents and clients run with and without
ttlcache: what counts is what the agents wait more than they would without it.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.stress.abuse.patterns import VOCAB, Asked, Pattern
from ttlcache.clock import VirtualClock, use_clock
from ttlcache_connector.role.parts import SchedulerRole
from ttlcache_sim.harness import EngineHarness, EngineSpec

MAX_STEPS = 5_000_000


@dataclass(frozen=True, slots=True)
class Load:
    """Sizes. Tokens are KV tokens, times virtual seconds."""

    agents: int = 24
    agents_a_s: float = 2.0
    turns: int = 6
    new_tokens: int = 300
    output_tokens: int = 16
    mean_gap_s: float = 2.0
    num_blocks: int = 1_200
    block_tokens: int = 16
    seats: int = 32
    step_s: float = 0.01
    token_s: float = 1e-4
    """An engine step takes `step_s` and this per token."""
    give_up_s: float = 400.0
    """Agents that are not done by then count as done then."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Waits:
    """What the agents that behave went through."""

    jcts_s: tuple[float, ...]
    """First request to last token."""
    waits_s: tuple[float, ...]
    """Of each turn, from its arrival to its first step."""
    hook_errors: int = 0
    hit_share: float = 0.0
    """Of their context tokens, those found in memory; first turns aside."""
    peak_pinned_blocks: int = 0

    @property
    def programs(self) -> int:
        return len(self.jcts_s)

    @property
    def mean_jct_s(self) -> float:
        return statistics.fmean(self.jcts_s)

    @property
    def p99_jct_s(self) -> float:
        return float(np.percentile(self.jcts_s, 99))

    @property
    def longest_wait_s(self) -> float:
        return max(self.waits_s)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same agents and clients on plain vLLM and, by policy, with ttlcache."""

    plain: Waits
    by_policy: Mapping[str, Waits]

    def ratios(self, policy: str) -> tuple[float, float, float]:
        """Mean JCT, p99 JCT and the longest wait of a turn, over plain vLLM's."""
        ours, plain = self.by_policy[policy], self.plain
        return (
            ours.mean_jct_s / plain.mean_jct_s,
            ours.p99_jct_s / plain.p99_jct_s,
            ours.longest_wait_s / plain.longest_wait_s,
        )

    def cells(self) -> list[str]:
        """Of a row of a table."""
        plain = self.plain
        return [f"{plain.mean_jct_s:.1f} s, {plain.longest_wait_s:.1f} s"] + [
            ", ".join(f"{ratio:.2f}" for ratio in self.ratios(policy))
            for policy in self.by_policy
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            policy: {
                "ratios": self.ratios(policy),
                "hook_errors": waits.hook_errors,
            }
            for policy, waits in self.by_policy.items()
        }


def compare(
    pattern: Pattern, load: Load, *, tenants: int, policies: Sequence[str]
) -> Comparison:
    """Play a pattern on plain vLLM and with each policy."""
    plain = play(pattern, load, tenants=tenants)
    ours = {
        policy: play(pattern, load, tenants=tenants, config={"policy": policy})
        for policy in policies
    }
    return Comparison(plain, ours)


@dataclass(slots=True)
class _Agent:
    name: str
    gaps_s: list[float]
    began_s: float = 0.0
    context: list[int] = field(default_factory=list)
    turn: int = 0
    done: bool = False


@dataclass(slots=True)
class _Client:
    number: int
    requests: int = 0
    context: list[int] = field(default_factory=list)


def play(
    pattern: Pattern | None,
    load: Load,
    *,
    tenants: int = 1,
    config: Mapping[str, Any] | None = None,
) -> Waits:
    """Play the agents of `load` beside a pattern.

    Args:
        pattern: of the clients; None: the agents alone.
        tenants: 2: the clients have a `cache_salt` of their own.
        config: `kv_connector_extra_config`; None: vLLM without a connector.

    Raises:
        RuntimeError: the engine does not get done.
    """
    clock = VirtualClock(1_000.0)
    with use_clock(clock):
        return _Play(pattern, load, tenants, config, clock).run()


class _Play:
    def __init__(
        self,
        pattern: Pattern | None,
        load: Load,
        tenants: int,
        config: Mapping[str, Any] | None,
        clock: VirtualClock,
    ) -> None:
        self._pattern, self._load, self._clock = pattern, load, clock
        self._salt = "clients" if tenants == 2 else "agents"
        self._engine = EngineHarness(
            EngineSpec(
                num_blocks=load.num_blocks,
                block_tokens=load.block_tokens,
                max_num_seqs=load.seats,
                max_num_batched_tokens=1_024,
                connector=config is not None,
                extra_config=config or {},
            )
        )
        self._order = itertools.count()
        self._due: list[tuple[float, int, _Agent | _Client]] = []
        self._sent: dict[str, tuple[_Agent | _Client, float]] = {}
        self._jcts_s: list[float] = []
        self._waits_s: list[float] = []
        self._agents: list[_Agent] = []
        self._hit = self._hittable = 0
        role = self._engine.connector.scheduler_role if config is not None else None
        self._role: SchedulerRole | None = role

    def run(self) -> Waits:
        load, clock, engine = self._load, self._clock, self._engine
        start_s = clock.now_s() + 10.0
        self._arrive(start_s)
        peak_pinned = 0
        for _ in range(MAX_STEPS):
            while self._due and self._due[0][0] <= clock.now_s():
                self._send(heapq.heappop(self._due)[2])
            late = clock.now_s() - start_s > load.give_up_s
            if len(self._jcts_s) == load.agents or late:
                break
            if not engine.scheduler.has_unfinished_requests():
                clock.advance(self._due[0][0] - clock.now_s())
                continue
            output = engine.step()
            for new in output.scheduled_new_reqs:
                self._admitted(new.req_id, new.num_computed_tokens)
            peak_pinned = max(peak_pinned, self._pinned_blocks())
            tokens = output.total_num_scheduled_tokens
            clock.advance(load.step_s + tokens * load.token_s)
            self._collect()
        else:
            raise RuntimeError(f"not done after {MAX_STEPS} steps")
        self._give_up()
        return Waits(
            tuple(self._jcts_s),
            tuple(self._waits_s),
            self._role.parts.faults.total if self._role is not None else 0,
            self._hit / max(1, self._hittable),
            peak_pinned,
        )

    def _pinned_blocks(self) -> int:
        if self._role is None:
            return 0
        return self._role.parts.holder.pressure().pinned_blocks

    def _arrive(self, start_s: float) -> None:
        load, rng = self._load, random.Random(self._load.seed)
        for number in range(load.agents):
            gaps_s = [
                rng.expovariate(1 / load.mean_gap_s) for _ in range(load.turns - 1)
            ]
            agent = _Agent(f"agent-{number}", gaps_s)
            agent.began_s = start_s + number / load.agents_a_s
            self._agents.append(agent)
            self._push(agent.began_s, agent)
        if self._pattern is not None:
            first_s = start_s + self._pattern.starts_at_s
            for number in range(self._pattern.clients):
                self._push(first_s + number * self._pattern.every_s, _Client(number))

    def _push(self, at_s: float, what: _Agent | _Client) -> None:
        heapq.heappush(self._due, (at_s, next(self._order), what))

    def _send(self, what: _Agent | _Client) -> None:
        if isinstance(what, _Agent):
            self._send_turn(what)
        else:
            self._send_request(what)

    def _send_turn(self, agent: _Agent) -> None:
        rng = random.Random(f"{agent.name}/{agent.turn}")
        agent.context += [rng.randrange(VOCAB) for _ in range(self._load.new_tokens)]
        agent.turn += 1
        hints: dict[str, Any] = {"program_id": agent.name, "tool": "bash"}
        if agent.turn == self._load.turns:
            hints["is_last_step"] = True
        name = f"{agent.name}/{agent.turn}"
        self._sent[name] = (agent, self._clock.now_s())
        self._engine.add(
            name,
            agent.context,
            max_tokens=self._load.output_tokens,
            hints=hints,
            cache_salt="agents",
        )

    def _send_request(self, client: _Client) -> None:
        assert self._pattern is not None
        sent = self._pattern.request(
            Asked(client.number, client.requests, client.context, self._contexts)
        )
        client.requests += 1
        name = f"client-{client.number}/{client.requests}"
        self._sent[name] = (client, self._clock.now_s())
        self._engine.add(
            name,
            sent.prompt,
            max_tokens=sent.max_tokens,
            hints=sent.hints,
            session_id=sent.session_id,
            cache_salt=sent.salt or self._salt,
        )

    def _contexts(self) -> list[list[int]]:
        return [agent.context for agent in self._agents if agent.context]

    def _admitted(self, request_id: str, cached_tokens: int) -> None:
        what, sent_s = self._sent[request_id]
        if isinstance(what, _Agent):
            self._waits_s.append(self._clock.now_s() - sent_s)
            if what.turn > 1:
                self._hit += cached_tokens
                self._hittable += len(what.context) - self._load.new_tokens

    def _collect(self) -> None:
        finished, self._engine.finished = self._engine.finished, {}
        now_s = self._clock.now_s()
        for request_id, request in finished.items():
            what, _ = self._sent.pop(request_id)
            what.context = list(request.all_token_ids)
            if isinstance(what, _Client):
                assert self._pattern is not None
                if self._pattern.repeats:
                    self._push(now_s, what)
            elif what.turn == self._load.turns:
                what.done = True
                self._jcts_s.append(now_s - what.began_s)
            else:
                self._push(now_s + what.gaps_s[what.turn - 1], what)

    def _give_up(self) -> None:
        """What never got done took until now, at least."""
        now_s = self._clock.now_s()
        self._jcts_s += [
            now_s - agent.began_s for agent in self._agents if not agent.done
        ]
        waiting = {request.request_id for request in self._engine.scheduler.waiting}
        for request_id, (what, sent_s) in self._sent.items():
            if request_id in waiting and isinstance(what, _Agent):
                self._waits_s.append(now_s - sent_s)
