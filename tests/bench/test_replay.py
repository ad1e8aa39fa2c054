"""The replay client against a fake completions API in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from bench.serve.replay import ReplayOptions, ReplayResult, new_token_ids, replay_with
from tests.bench.fake_server import FakeServer
from ttlcache_sim.load.programs import Program, Turn
from ttlcache_sim.metrics import TurnRecord, by_program

AGENT = Program(
    "agent", 0.0, (Turn(6, 3, "pytest", 0.05), Turn(4, 2, "ls", 0.0), Turn(3, 2, "", 0))
)


def run(
    server: FakeServer,
    options: ReplayOptions | None = None,
    seen: list[TurnRecord] | None = None,
    programs: Sequence[Program] = (AGENT,),
) -> ReplayResult:
    async def go() -> ReplayResult:
        async with server.client() as client:
            on_turn = None if seen is None else seen.append
            return await replay_with(
                client, programs, options or ReplayOptions(), on_turn
            )

    return asyncio.run(go())


def test_each_prompt_extends_the_last_by_its_real_output_and_new_tokens():
    server = FakeServer()
    run(server)
    first, second, third = (body["prompt"] for body in server.bodies)
    new = [
        new_token_ids("agent", n, t, ReplayOptions()) for n, t in enumerate(AGENT.turns)
    ]
    assert first == new[0]
    assert second == [*first, 100, 101, 102, *new[1]]
    assert third == [*second, 100, 101, *new[2]]
    assert all(5 <= token < 2048 for token in first)
    body = server.bodies[0]
    assert (body["max_tokens"], body["min_tokens"]) == (3, 3)
    assert (body["ignore_eos"], body["temperature"]) == (True, 0.0)


def test_records_hold_what_the_server_said():
    seen: list[TurnRecord] = []
    result = run(FakeServer(), seen=seen)
    assert result.failures == ()
    assert list(result.records) == seen
    first, second, _ = result.records
    assert first.output_token_ids == (100, 101, 102)
    assert (first.first_logprob, first.queue_s, first.cached_tokens) == (-0.5, 0.25, 2)
    assert (first.prompt_tokens, first.context_tokens, first.tool) == (6, 9, "pytest")
    assert first.arrival_s <= first.first_token_s <= first.departure_s
    assert second.arrival_s - first.departure_s >= 0.05, "the tool's time is slept"


def test_hints_name_program_tool_and_last_step():
    server = FakeServer()
    run(server)
    hints = [body["kv_transfer_params"]["ttlcache"] for body in server.bodies]
    assert hints == [
        {"program_id": "agent", "is_last_step": False, "tool": "pytest"},
        {"program_id": "agent", "is_last_step": False, "tool": "ls"},
        {"program_id": "agent", "is_last_step": True},
    ]
    silent = FakeServer()
    run(silent, ReplayOptions(hints=False))
    assert all("kv_transfer_params" not in body for body in silent.bodies)


def test_a_failed_request_ends_its_program_and_is_reported():
    server = FakeServer(fails=range(1, 2))
    result = run(server)
    assert len(result.records) == 1
    (failure,) = result.failures
    assert (failure.program_id, failure.turn) == ("agent", 1)
    assert "HTTP 500" in failure.reason
    assert "pool on fire" in failure.reason
    assert len(server.bodies) == 2


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("drop_tokens", 1, "2 output tokens, expected 3"),
        ("with_usage", False, "--enable-prompt-tokens-details"),
        ("with_done", False, "without [DONE]"),
    ],
)
def test_incomplete_streams_are_failures(attribute, value, message):
    server = FakeServer()
    setattr(server, attribute, value)
    (failure,) = run(server).failures
    assert message in failure.reason


def test_a_failed_request_is_sent_again_as_often_as_asked():
    server = FakeServer(fails=range(1, 2))
    result = run(server, ReplayOptions(retries=1))
    assert result.failures == ()
    assert [failure.turn for failure in result.retried] == [1]
    assert server.bodies[1] == server.bodies[2]
    assert len(result.records) == 3


def test_no_more_programs_than_asked_are_in_progress():
    agents = [replace(AGENT, program_id=f"agent-{n}") for n in range(3)]
    together = run(FakeServer(), ReplayOptions(at_once=3), programs=agents)
    assert _most_at_once(together) == 3
    for at_once in (1, 2):
        told = run(FakeServer(), ReplayOptions(at_once=at_once), programs=agents)
        assert len(told.records) == 9
        assert _most_at_once(told) == at_once


def _most_at_once(result: ReplayResult) -> int:
    spans = [
        (min(r.arrival_s for r in own), max(r.departure_s for r in own))
        for own in by_program(result.records).values()
    ]
    return max(sum(a <= start < b for a, b in spans) for start, _ in spans)
