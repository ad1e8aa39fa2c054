"""`bench demo` and `bench settings` without a server: arms, verdict, tables."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.compare import report
from bench.compare.agents import CONNECTOR, LMCACHE, arm_of
from bench.compare.demo import DemoOptions
from bench.serve.arms import ArmResult, EngineCounters
from bench.serve.replay import Failure
from tests.bench.samples import served
from ttlcache_sim.metrics import TurnRecord, summarize

NO_PINS = EngineCounters(100, 40, 0, {}, 0, 0, 0.0, 0)
EXTRA = "kv_connector_extra_config"


def record(logprob: float = -1.0, token: int = 7) -> TurnRecord:
    return served(first_logprob=logprob, output_token_ids=(token,))


def arm(name: str, seen: TurnRecord, engine: EngineCounters = NO_PINS) -> ArmResult:
    return ArmResult(
        name=name,
        command=("python", "-m", "server"),
        log_path=Path("server.log"),
        records=(seen,),
        failures=(),
        log_errors=(),
        summary=summarize([seen]),
        engine=engine,
        replay_s=2.0,
    )


# --- arms --------------------------------------------------------------------


def test_the_pairs_differ_in_the_connector_and_the_server_below():
    options = DemoOptions(connector_config={"policy": "cachettl"}, out=Path("/there"))
    arms = [arm_of(name, of, options) for name, of in options.settings().items()]
    recorded = {"policy": "cachettl", "record_path": "/there/recording"}
    tiered = {"policy": "cachettl", "lower_tier": "cpu", "cpu_gb": 1.5}
    assert [arm.server.kv_transfer_config for arm in arms] == [
        None,
        {**CONNECTOR, EXTRA: recorded},
        {**LMCACHE, EXTRA: {}},
        {**CONNECTOR, EXTRA: tiered},
    ]
    assert [arm.tiers for arm in arms] == [None, None, options.tiers, None]
    servers = [replace(arm.server, kv_transfer_config=None) for arm in arms]
    assert servers == [options.server(None)] * 4


# --- verdict and tables ------------------------------------------------------


def test_every_reason_to_fail_is_named():
    failed = replace(
        arm("vanilla", record()),
        failures=(Failure("agent", 3, "HTTP 500"),),
        log_errors=("ERROR engine died",),
    )
    other = arm("ttlcache", record(logprob=-1.5, token=8))
    arms = (failed, arm("lmcache", record()), other)
    assert report.results([{each.name: each for each in arms}])[1] == [
        "round 1: vanilla: 1 failed requests, e.g. agent turn 3: HTTP 500",
        "round 1: vanilla: 1 errors in server.log, e.g. ERROR engine died",
        "round 1: ttlcache: outputs differ from vanilla's in 1 turns, e.g. agent "
        "turn 0",
        "round 1: ttlcache: first-token logprobs differ by 0.5 from vanilla's, "
        "allowed 0.001",
    ]


def summary(jct_s, tokens_per_s=100.0):
    numbers = {"mean_jct_s": jct_s, "p99_turn_s": 2 * jct_s}
    told = SimpleNamespace(**numbers, output_tokens_per_s=tokens_per_s)
    return SimpleNamespace(summary=told)


def test_each_round_is_compared_with_its_own_base():
    done = [
        {"a": summary(10.0), "b": summary(5.0)},
        {"a": summary(40.0), "b": summary(80.0)},
    ]
    ratio = report.ratio(done, "mean_jct_s", "b", "a")
    assert ratio.by_round == (0.5, 2.0)
    assert ratio.geometric_mean == pytest.approx(1.0)
    # ln 2 and -ln 2: their standard deviation is sqrt(2) ln 2, of the mean ln 2.
    assert ratio.standard_error == pytest.approx(math.log(2.0))
