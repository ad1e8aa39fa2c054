"""Gates by hand."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from bench.sim.rivals.oracle import OracleGate
from bench.sim.rivals.session_lease import FORCE_S, LEASE_S, SessionLeaseGate
from bench.sim.rivals.thunderagent import ThunderAgentGate
from ttlcache_sim.load.agents import Agent
from ttlcache_sim.load.programs import Program, Turn


def _agent(index: int, tokens: int, turns: int = 3) -> Agent:
    body = tuple(Turn(tokens if i == 0 else 10, 10, "t", 1.0) for i in range(turns))
    return Agent(index, Program(f"p{index}", 0.0, body))


def _next(agent: Agent) -> None:
    agent.context_tokens = agent.prompt_tokens + agent.current.output_tokens
    agent.turn += 1


def test_thunderagent_admits_what_fits_and_restores_shortest_first():
    gate = ThunderAgentGate(1_000)
    big, small, long = _agent(0, 700), _agent(1, 250), _agent(2, 500)
    assert gate.arrive(big, 0.0) == [big]
    assert gate.arrive(long, 0.1) == []
    assert gate.arrive(small, 0.2) == []  # fits, but somebody is paused already
    assert gate.tick(4.9) == []
    assert gate.tick(5.0) == []  # 700 + 100 run: no room for 250 + 100
    gate.finish(big, 6.0)
    # 700 * 2^-4 + 100 at t = 10: room for both, the shorter one first.
    assert gate.tick(10.0) == [small]
    assert gate.next_s() == 15.0


def test_thunderagent_pauses_acting_programs_first_and_shortest_first():
    gate = ThunderAgentGate(2_000)
    agents = [_agent(i, size) for i, size in enumerate((600, 500, 400))]
    for agent in agents:
        assert gate.arrive(agent, 0.0) == [agent]
    for agent in agents[1:]:
        gate.finish(agent, 4.9)
        _next(agent)
    gate._capacity = 1_300  # the same programs, less memory
    assert gate.tick(5.0) == []
    assert gate.arrive(agents[2], 6.0) == []  # 400, the shortest acting one
    assert gate.arrive(agents[1], 6.0) == [agents[1]]


def test_an_idle_session_keeps_its_room_for_the_lease_and_gives_it_on_demand():
    gate = SessionLeaseGate(1_000)
    idle, big, new, small = (
        _agent(i, size) for i, size in enumerate((500, 450, 300, 40))
    )
    assert gate.arrive(idle, 0.0) == [idle]
    assert gate.arrive(big, 0.0) == [big]
    assert gate.arrive(new, 1.0) == []
    assert gate.arrive(small, 1.0) == [small]  # the one before it does not fit
    assert gate.finish(idle, 2.0) == []
    _next(idle)
    assert gate.next_s() == 2.0 + LEASE_S
    assert gate.tick(31.9) == []
    assert gate.tick(32.0) == [new]
    # Its room is gone: it waits for the next lease to end, or half an hour.
    assert gate.arrive(idle, 33.0) == []
    assert gate.next_s() == 33.0 + FORCE_S
    assert gate.finish(big, 34.0) == []
    assert gate.next_s() == 34.0 + LEASE_S
    assert gate.tick(64.0) == [idle]
    # A turn of a session inside passes, whatever it weighs.
    assert gate.arrive(_agent(2, 3_000), 65.0) != []


def test_the_oracle_lets_in_what_fits_least_tokens_x_seconds_first():
    gate = OracleGate(1_000, lambda agent: 1.0, token_s=0.001)
    # 470, 330, 260 and 120 tokens at 0.7 of the way, for about as many seconds.
    agents = [_agent(i, size) for i, size in enumerate((620, 420, 320, 120))]
    assert gate.arrive(agents[0], 0.0) == [agents[0]]
    assert gate.arrive(agents[1], 0.0) == [agents[1]]
    assert gate.arrive(agents[2], 0.0) == []
    assert gate.arrive(agents[3], 0.0) == [agents[3]]
    # The second one's tool takes longer than to prefill it again: it holds nothing.
    assert gate.finish(agents[1], 5.0) == [agents[2]]
