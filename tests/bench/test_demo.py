"""The demo's workload checks, verdict and table, without a server."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from bench.cli import app
from bench.compare import demo, demo_report, rounds
from bench.compare.demo import CONNECTOR, LMCACHE, DemoOptions
from bench.serve.arms import Arm, ArmResult, EngineCounters, above
from bench.serve.replay import Failure
from bench.sim.load.scaled import longest_context
from bench.sim.metrics import TurnRecord, summarize
from tests.bench.samples import served
from ttlcache_connector.lmcache_server.launch import TierOptions

NO_PINS = EngineCounters(100, 40, 2.0, 4, 0, {}, 0, 0, 0, 0, 0)


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
        start_up_s=30.0,
        replay_s=2.0,
    )


def test_equal_arms_have_no_problems() -> None:
    arms = (arm("vanilla", record()), arm("ttlcache", record(logprob=-1.0005)))
    assert demo_report.problems(arms) == []


def test_every_reason_to_fail_is_named() -> None:
    failed = replace(
        arm("vanilla", record()),
        failures=(Failure("agent", 3, "HTTP 500"),),
        log_errors=("ERROR engine died",),
    )
    other = arm("ttlcache", record(logprob=-1.5, token=8))
    assert demo_report.problems((failed, arm("lmcache", record()), other)) == [
        "vanilla: 1 failed requests, e.g. agent turn 3: HTTP 500",
        "vanilla: 1 errors in server.log, e.g. ERROR engine died",
        "ttlcache: outputs differ from vanilla's in 1 turns, e.g. agent turn 0",
        "ttlcache: first-token logprobs differ by 0.5 from vanilla's, allowed 0.001",
    ]


def test_every_arm_is_compared_with_the_first() -> None:
    arms = [
        arm("vanilla", record()),
        arm("ttlcache", record(logprob=-1.25)),
        arm("lmcache", record(token=8)),
    ]
    outputs = demo_report.outputs_of(arms)
    assert not outputs.tokens_identical
    assert outputs.differing_turns == (("agent", 0),)
    assert outputs.first_token_logprob_max_diff == 0.25
    assert demo_report.outputs_of(arms[:1]).tokens_identical


def test_the_pairs_differ_in_the_connector_and_the_server_below() -> None:
    options = DemoOptions(connector_config={"policy": "cachettl"})
    (vanilla, ours), (plain, below) = demo._pairs(options, "/there")
    assert vanilla.tiers is None
    assert vanilla.server.kv_transfer_config is None
    assert ours.tiers is None
    assert _connector(ours) == "TTLConnector"
    assert _extra(ours) == {"record_path": "/there", "policy": "cachettl"}
    assert plain.tiers == below.tiers == options.tiers
    assert _connector(plain) == "LMCacheMPConnector"
    assert _connector(below) == "TTLConnector"
    assert _extra(below) == {"lower_tier": "lmcache", "policy": "cachettl"}


def test_an_arm_above_a_server_is_told_its_address() -> None:
    server = DemoOptions().server({**LMCACHE, "kv_connector_extra_config": {"a": 1}})
    transfer = above(server, TierOptions(port=4711)).kv_transfer_config
    assert transfer == {
        **LMCACHE,
        "kv_connector_extra_config": {
            "a": 1,
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": 4711,
        },
    }


def _connector(arm: Arm) -> str:
    assert arm.server.kv_transfer_config is not None
    return str(arm.server.kv_transfer_config["kv_connector"])


def _extra(arm: Arm) -> dict[str, object]:
    assert arm.server.kv_transfer_config is not None
    return dict(arm.server.kv_transfer_config["kv_connector_extra_config"])


def test_agents_that_wait_for_a_place_arrive_together_in_another_order() -> None:
    one, other = (DemoOptions(at_once=3, seed=seed) for seed in (0, 1))
    assert {program.arrival_s for program in one.workload()} == {0.0}
    names = [[p.program_id for p in options.workload()] for options in (one, other)]
    assert names[0] != names[1]
    assert sorted(names[0]) == sorted(names[1])
    assert one.replay().at_once == 3


def test_an_arm_in_json_has_the_promised_keys() -> None:
    engine = replace(NO_PINS, pins={"claimed": 9, "expired": 1})
    found = demo_report.arm_json(arm("ttlcache", record(), engine))
    assert json.loads(json.dumps(found)) == found
    assert found["pins"] == {"claimed": 9, "expired": 1}
    assert found["mean_jct_s"] == found["p95_jct_s"] == 2.0
    assert found["prompt_hit"] == found["engine_prompt_hit"] == 0.4
    assert found["mean_wait_s"] == found["engine_mean_wait_s"] == 0.5


def test_the_table_shows_all_arms_ratios_and_unknown_outcomes() -> None:
    engine = replace(NO_PINS, pins={"claimed": 9, "reset": 2})
    below = replace(engine, tier_bytes={"demoted": 7_000_000})
    slow = replace(record(), departure_s=4.0)
    pairs = [
        (arm("vanilla", slow), arm("ttlcache", record(), engine)),
        (arm("lmcache", record()), arm("ttlcache+lmcache", slow, below)),
    ]
    grid = demo_report.table(pairs)
    cells = (column.cells for column in grid.columns)
    rows = {row[0]: row[1:] for row in zip(*cells, strict=True)}
    assert [column.header for column in grid.columns] == [
        *("", "vanilla", "ttlcache", "ratio"),
        *("lmcache", "ttlcache+lmcache", "ratio"),
    ]
    assert rows["mean JCT"] == ("4 s", "2 s", "0.50x", "2 s", "4 s", "2.00x")
    assert rows["pins claimed"] == ("-", "9", "", "-", "9", "")
    assert rows["pins reset"] == ("-", "2", "", "-", "2", "")
    assert rows["MB demoted"] == ("-", "-", "", "-", "7", "")
    assert rows["tokens identical"][1] == "yes"
    console = Console(file=io.StringIO(), width=100)
    console.print(grid)
    assert "ttlcache+lmcache" in console.file.getvalue()  # type: ignore[attr-defined]


def test_savings_are_told_beside_what_the_arms_measure() -> None:
    plain = arm("vanilla", replace(record(), cached_tokens=10))
    ours = arm("ttlcache", record(), replace(NO_PINS, prefill_tokens_saved=27))
    saved = demo_report.savings(plain, ours)
    assert saved == {"told_tokens": 27, "measured_tokens": 30, "ratio": 0.9}
    assert demo_report.savings(ours, ours)["ratio"] is None


def test_versions_name_python_and_skip_what_is_absent() -> None:
    found = rounds.versions()
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
