"""The demo's workload checks, verdict and table, without a server."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from bench import demo_report
from bench.arms import ArmResult, EngineCounters
from bench.cli import app
from bench.demo import CONNECTOR, DemoOptions
from bench.metrics import TurnRecord, compare_outputs, summarize
from bench.replay import Failure
from bench.workloads import longest_context

NO_PINS = EngineCounters(100, 40, 2.0, 4, 0, {}, 0, 0, 0, 0, 0)


def record(logprob: float = -1.0, token: int = 7) -> TurnRecord:
    return TurnRecord(
        program_id="agent",
        turn=0,
        arrival_s=0.0,
        first_token_s=1.0,
        departure_s=2.0,
        queue_s=0.5,
        prompt_tokens=100,
        cached_tokens=40,
        output_token_ids=(token,),
        first_logprob=logprob,
    )


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
        start_up_s=30.0,
        replay_s=2.0,
    )


def test_equal_arms_have_no_problems() -> None:
    arms = (arm("vanilla", record()), arm("ttlcache", record(logprob=-1.0005)))
    outputs = compare_outputs(arms[0].records, arms[1].records)
    assert demo_report.problems(arms, outputs) == []


def test_every_reason_to_fail_is_named() -> None:
    failed = replace(
        arm("vanilla", record()),
        failures=(Failure("agent", 3, "HTTP 500"),),
        log_errors=("ERROR engine died",),
    )
    other = arm("ttlcache", record(logprob=-1.5, token=8))
    outputs = compare_outputs(failed.records, other.records)
    assert demo_report.problems((failed, other), outputs) == [
        "vanilla: 1 failed requests, e.g. agent turn 3: HTTP 500",
        "vanilla: 1 errors in server.log, e.g. ERROR engine died",
        "outputs differ in 1 turns, e.g. agent turn 0",
        "first-token logprobs differ by 0.5, allowed 0.001",
    ]


def test_an_arm_in_json_has_the_promised_keys() -> None:
    engine = replace(NO_PINS, pins={"claimed": 9, "expired": 1})
    found = demo_report.arm_json(arm("ttlcache", record(), engine))
    assert json.loads(json.dumps(found)) == found
    assert found["pins"] == {"claimed": 9, "expired": 1}
    assert found["mean_jct_s"] == found["p95_jct_s"] == 2.0
    assert found["prompt_hit"] == found["engine_prompt_hit"] == 0.4
    assert found["mean_wait_s"] == found["engine_mean_wait_s"] == 0.5


def test_the_table_shows_both_arms_and_unknown_outcomes() -> None:
    engine = replace(NO_PINS, pins={"claimed": 9, "reset": 2})
    arms = (arm("vanilla", record()), arm("ttlcache", record(), engine))
    console = Console(file=io.StringIO(), width=100)
    outputs = compare_outputs(arms[0].records, arms[1].records)
    console.print(demo_report.table(*arms, outputs))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for word in (
        "vanilla",
        "ttlcache",
        "mean JCT",
        "pins claimed",
        "pins reset",
        "yes",
    ):
        assert word in text


def test_savings_are_told_beside_what_the_arms_measure() -> None:
    plain = arm("vanilla", replace(record(), cached_tokens=10))
    ours = arm("ttlcache", record(), replace(NO_PINS, prefill_tokens_saved=27))
    saved = demo_report.savings(plain, ours)
    assert saved == {"told_tokens": 27, "measured_tokens": 30, "ratio": 0.9}
    assert demo_report.savings(ours, ours)["ratio"] is None


def test_versions_name_python_and_skip_what_is_absent() -> None:
    found = demo_report.versions()
    assert found["python"].count(".") == 2
    assert "no-such-package" not in found


def test_the_default_workload_fits_the_pool_one_by_one_but_not_together() -> None:
    options = DemoOptions()
    programs = options.workload()
    room = options.server(None).max_model_len
    assert longest_context(programs) <= room
    assert sum(program.context_tokens for program in programs) > 5 * room


def test_a_program_larger_than_the_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="raise --blocks or lower --token-scale"):
        DemoOptions(blocks=64).workload()


def test_the_arms_differ_in_the_transfer_config_only() -> None:
    options = DemoOptions()
    ours = options.server(CONNECTOR)
    assert replace(ours, kv_transfer_config=None) == options.server(None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--connector-config", "{"], "is not JSON"),
        (["--connector-config", "[1]"], "must be a JSON object"),
        (["--trace", "no-such-file.gz"], "no such file"),
        (["--rate", "0"], "must be positive"),
        (["--blocks", "32"], "raise --blocks"),
    ],
)
def test_bad_options_end_with_an_error_before_a_server_starts(
    arguments: list[str], message: str
) -> None:
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())
