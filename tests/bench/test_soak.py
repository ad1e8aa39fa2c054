"""The soak's agents, watch and verdict, without vLLM."""

from __future__ import annotations

import asyncio
import math
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest

from bench.stress.soak import report
from bench.stress.soak.agents import AgentOptions, Fleet
from bench.stress.soak.options import SoakOptions
from bench.stress.soak.report import Ending, SoakResult
from bench.stress.soak.requests import JUNK, Tally
from bench.stress.soak.watch import Sample, Watch, read_probe
from tests.bench.fake_server import FakeServer
from ttlcache_sim.load.programs import Program, Turn

PROGRAM = Program("p", 0.0, (Turn(6, 3, "pytest", 0.0), Turn(4, 2, "", 0.0)))
OPTIONS = SoakOptions(agents=4)
ENDING = Ending(319, 319, 319, 0, 1, {"claimed": 9.0}, 2, 1, 3)


def play(server: FakeServer, turns: int, **options: Any) -> Tally:
    """Agents until so many turns were answered, or one failed."""

    async def go() -> Tally:
        async with server.client() as client:
            stop = asyncio.Event()
            shares = AgentOptions(2, ramp_s=0.0, **options)
            fleet = Fleet(client, [PROGRAM], shares, stop)
            await fleet.prepare()

            async def watch() -> None:
                while fleet.tally.answered < turns and not fleet.tally.failed:
                    await asyncio.sleep(0.0)
                stop.set()

            await asyncio.gather(fleet.run(), watch())
            return fleet.tally

    return asyncio.run(go())


def result(**changes: Any) -> SoakResult:
    """A soak of 100 s in which everything held."""
    samples = [Sample(5.0 * i, 500.0, 800.0, 700, 0.02, 5.0) for i in range(21)]
    tally = Tally(100, styles={"hints": 9}, waits_s=[1.0, 30.0], longest_service_s=4.0)
    held = SoakResult(tally, Watch(samples), 100.0, ENDING, own_mib=4.0)
    return replace(held, **changes)


def failed(found: SoakResult) -> list[str]:
    return [c.name for c in report.checks(found, OPTIONS) if not c.ok]


def test_agents_grow_their_prompts_by_real_answers():
    server = FakeServer()
    tally = play(server, 80, abort_share=0.0, junk_share=0.0)
    assert tally.failed == 0
    assert tally.programs > 5
    assert tally.waits_s[0] == 0.25
    junk = [body.get("kv_transfer_params") for body in server.bodies[: len(JUNK)]]
    assert junk == [{"ttlcache": each} for each in JUNK], "every label at once"
    bodies = server.bodies[len(JUNK) + 1 :]
    firsts = [body["prompt"] for body in bodies if body["max_tokens"] == 3]
    seconds = [body["prompt"] for body in bodies if body["max_tokens"] == 2]
    for prompt in seconds:
        start = prompt[:-4]
        assert start[-3:] == [100, 101, 102]
        assert start[:-3] in firsts
    assert {len(prompt) for prompt in firsts} == {6, 6 + 96}, "some share a prefix"
    assert any(server.sessions), "some are known by their session"


def test_aborted_turns_are_counted_apart_and_sometimes_retried():
    server = FakeServer()
    tally = play(server, 60, abort_share=0.5)
    assert tally.failed == 0
    assert tally.aborted > 10
    assert 0 < tally.left < tally.aborted
    assert tally.junk_hints > 0


def test_a_refused_request_is_a_failure_with_its_text():
    tally = play(FakeServer(fails=range(1000)), 1)
    assert "HTTP 500" in tally.reasons[0]
    assert "pool on fire" in tally.reasons[0]


def sampled(**changes: Any) -> Watch:
    """The usual samples, the last five of them changed."""
    samples = result().watch.samples
    return Watch([*samples[:-5], *(replace(s, **changes) for s in samples[-5:])])


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({"log_errors": ("ERROR x",)}, "errors in the server's log"),
        ({"tally": Tally(answered=5, failed=1, waits_s=[0.0])}, "requests answered"),
        ({"tally": Tally(waits_s=[0.0])}, "requests answered"),
        ({"watch": Watch(result().watch.samples, ["no"])}, "scrapes of /metrics"),
        ({"watch": sampled(api_rss_mib=600.0)}, "growth of the API server"),
        ({"watch": sampled(engine_rss_mib=900.0)}, "growth of the engine core"),
        ({"watch": sampled(metrics_lines=801)}, "lines of /metrics"),
        ({"ending": replace(ENDING, hook_errors=1)}, "exceptions in hooks"),
        ({"own_mib": 33.0}, "ttlcache's own objects"),
        ({"own_mib": math.nan}, "ttlcache's own objects"),
        ({"ending": replace(ENDING, retention_enabled=0)}, "retention still on"),
        ({"ending": replace(ENDING, free_after_ttl=318)}, "all TTLs"),
        ({"ending": replace(ENDING, free_after_reset=math.nan)}, "after a reset"),
        ({"tally": Tally(5, waits_s=[37.0], longest_service_s=4.0)}, "longest wait"),
    ],
)
def test_every_broken_promise_is_named(changes, broken):
    (name,) = failed(result(**changes))
    assert broken in name


@pytest.mark.nightly
def test_the_probe_sees_our_objects_and_no_others(tmp_path):
    from bench.stress.soak import probe
    from ttlcache.estimators.gap_history import GapHistory
    from ttlcache.types import GapKey

    path = tmp_path / "own_mib.txt"
    tracemalloc.start()
    try:
        foreign = [bytes(1 << 20) for _ in range(4)]
        assert probe.own_mib() < 0.1
        history = GapHistory()
        for number in range(20_000):
            history.observe(GapKey(f"tool{number}"), 1.0)
        assert math.isnan(read_probe(path, patience_s=0.0))
        probe._look(path)
        assert read_probe(path) > 1.0
    finally:
        tracemalloc.stop()
    assert len(foreign) == 4
