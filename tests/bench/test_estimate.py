"""`ttlcache estimate`: defaults, notes, verdict; a run from a log to its picture."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.bench.samples import log_sample, recorded, write_trace
from tests.commands import output_of
from ttlcache.cli.main import app
from ttlcache_sim.bootstrap import Interval
from ttlcache_sim.estimate import plan, report
from ttlcache_sim.estimate.plan import ARMS, SEEDS, EstimateOptions, plan_of, rates_of
from ttlcache_sim.estimate.sessions import (
    MAX_GAP_S,
    Sessions,
    read_sessions,
    save_trace,
    with_shared_heads,
)
from ttlcache_sim.estimate.verdict import Load, Outcome, loads_of, verdict
from ttlcache_sim.load.programs import Program, Turn
from ttlcache_sim.load.traces import RecordedProgram
from ttlcache_sim.load.workload import Workload, WorkloadSpec, recorded_programs
from ttlcache_sim.settings import Cell, CellResult, EngineSetting

QUIET = Console(quiet=True)


def sessions(tmp_path: Path, *turns: dict[str, Any], **fields: Any) -> Sessions:
    path = write_trace(tmp_path / "t.gz", recorded(*turns, **fields))
    return read_sessions([path], QUIET)


def test_unknown_tool_times_are_defaults_of_their_class(tmp_path: Path) -> None:
    found = sessions(
        tmp_path,
        {"tool": "bash", "exe": "pytest"},
        {"tool": "cat+pip"},
        {"tool": "Read"},
        {"tool": None},
        {"tool": "__user__"},
        {"tool": "search", "tool_s": 9999.0},
        {},
    )
    gaps = [turn.tool_s for turn in found.programs[0].turns[:-1]]
    assert gaps == [10.0, 1.0, 0.1, 1.0, 60.0, MAX_GAP_S]
    typical = "a default for each class, 1 s in the median"
    assert f"tool times of 5 of 6 gaps: {typical}" in found.notes
    assert "1 of 6 gaps are cut to 600 s" in found.notes


def test_what_was_guessed_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.traj").write_text(log_sample("swe-agent.json"))
    (tmp_path / "b.json").write_text(log_sample("atif.json"))
    (tmp_path / "c.txt").write_text("?")
    notes = read_sessions([tmp_path], QUIET).notes
    assert notes[0] == "2 programs in logs: 1 of SWE-agent, 1 of ATIF"
    assert notes[1].startswith("1 files in no known format are left out: ")
    assert "tokens of 3 of 6 turns: characters / 4" in notes
    assert "tool times of 2 of 4 gaps: less 20 ms a token decoded" in notes


def test_the_trace_that_is_replayed_has_every_turn(tmp_path: Path) -> None:
    found = sessions(tmp_path, {"tool": "Read"}, {})
    path = save_trace(found.programs, tmp_path)
    (body,) = recorded_programs(path, "")
    assert [(t.new_prompt_tokens, t.tool, t.gap_s) for t in body] == [
        (90, "Read", 0.1),
        (90, "search", 1.0),
    ]
    # 100 + 90 of the second prompt, which has 190 tokens; the first one has 90.
    assert found.best_hit == pytest.approx(100 / 280)


def test_the_pool_is_what_the_weights_leave(tmp_path: Path) -> None:
    found = sessions(tmp_path, {}, {})
    options = EstimateOptions([tmp_path])
    engine = plan_of(options, found, tmp_path).engine
    pool_gb = 0.92 * 80 - 3 - 2 * 8.03
    assert engine.pool_tokens == pytest.approx(pool_gb * 1e9 / 131_072, rel=0.001)
    assert not engine.tell_last
    blocks = plan_of(replace(options, blocks=8_000), found, tmp_path).engine
    assert blocks.pool_tokens == 128_000
    with pytest.raises(ValueError, match=r"qwen3-32b does not fit into 48 GB of a GPU"):
        plan_of(replace(options, gpu_gb=48, model="qwen3-32b"), found, tmp_path)


def test_long_programs_are_fewer(tmp_path: Path) -> None:
    options = EstimateOptions([tmp_path], blocks=2000)
    few = plan_of(options, sessions(tmp_path, *[{}] * 50), tmp_path).spec
    assert few.programs == plan.MAX_TURNS // 50
    short = sessions(tmp_path, {}, {})
    assert plan_of(replace(options, blocks=100), short, tmp_path).spec.programs == 120


def test_the_pool_is_filled_or_nothing_is_estimated(tmp_path: Path) -> None:
    options, short = EstimateOptions([], blocks=7_000), sessions(tmp_path, {}, {})
    full = plan_of(options, short, save_trace(short.programs, tmp_path))
    tokens = full.spec.programs * short.mean_context_tokens(most=10**9)
    assert tokens >= 3 * full.engine.pool_tokens
    assert full.why_no_estimate(short) == ""
    options, long = replace(options, blocks=40_000), sessions(tmp_path, *[{}] * 200)
    none = plan_of(options, long, save_trace(long.programs, tmp_path))
    told = none.why_no_estimate(long)
    assert told.startswith("no estimate: 36 programs do not fill the pool; try ")


def test_loads_are_shares_of_the_capacity_or_of_the_rate() -> None:
    options = EstimateOptions([])
    assert rates_of(options, 0.2) == [0.1, 0.16, 0.22]
    assert rates_of(replace(options, rate=2.0), 0.0) == [1.0, 2.0, 3.0]


def load(rate: float, ratio: float, hit: float = 0.5, wide: float = 0.02) -> Load:
    base = Outcome(100.0, 9.0, hit, 0.5)
    ours = Outcome(100.0 * ratio, 1.0, 0.9, 1.0)
    return Load(rate, base, ours, Interval(ratio, ratio - wide, ratio + wide))


NONE_PAYS = "It pays at none of these loads: "


@pytest.mark.parametrize(
    ("loads", "told"),
    [
        (
            [load(0.1, 1.0, hit=0.94), load(0.2, 0.7), load(0.3, 0.5)],
            ["pays from 0.2 programs/s on: 30% less", "alone hits 94% of the prompt"],
        ),
        (
            [load(0.1, 0.8)],
            [
                "from 0.1 programs/s on: 20% less",
                "Less than 0.1 programs/s was not simulated",
            ],
        ),
        (
            [load(0.1, 1.0), load(0.2, 0.99)],
            [f"{NONE_PAYS}a job takes 1% less time, vLLM alone hits 50%"],
        ),
        ([load(0.2, 0.9, wide=0.2)], [f"{NONE_PAYS}the difference may be chance"]),
    ],
)
def test_the_verdict(
    loads: list[Load], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Sessions((), ())
    monkeypatch.setattr(Sessions, "best_hit", 0.95)
    monkeypatch.setattr(Sessions, "median_gap_s", 30.0)
    for line, part in zip(verdict(loads, found, [1.0, 1.0]), told, strict=True):
        assert part in line


def test_what_no_percentage_says_is_told() -> None:
    """Queues that grow for as long as a run lasts, and first tokens that come later."""
    found = Sessions((), ())
    told = verdict([load(0.5, 0.2)], found, [0.4, 0.6])[0]
    assert told.endswith(
        "vLLM alone does not keep up, it completes 0.4/s, ttlcache 0.6/s."
    )
    late = replace(load(0.5, 0.8).with_ttlcache, p95_ttft_s=20.0)
    told = verdict([replace(load(0.5, 0.8), with_ttlcache=late)], found, [0.6, 0.6])[0]
    assert told.endswith("20% less time a job; but p95 TTFT is 20 s for 9 s.")


def of_opening(text: str, cached: int | None = None) -> RecordedProgram:
    program = RecordedProgram.model_validate(recorded({}))
    return program.model_copy(update={"opening": text, "cached_tokens": cached})


def heads_of(*programs: RecordedProgram) -> list[int]:
    return [each.turns[0].shared_tokens for each in with_shared_heads(programs)[0]]


def test_what_first_prompts_share_is_learnt_from_texts_or_a_servers_cache() -> None:
    prompts = [f"{'s' * 400}{number}: {'x' * 99}" for number in range(5)]
    texts = [of_opening(text) for text in prompts]
    assert heads_of(*texts) == [100] * 5
    lacking = [each.model_copy(update={"unlogged_tokens": 165}) for each in texts]
    assert heads_of(*lacking, texts[0]) == [165] * 5 + [100]
    cached = [of_opening("", n) for n in (0, 70, 180, 190, 180)]
    assert heads_of(*cached, *texts) == [180] * 5 + [100] * 5
    assert heads_of(*(of_opening(text, 0) for text in prompts)) == [100] * 5
    _, (told,) = with_shared_heads([of_opening("")] * 3)
    assert "in favour of ttlcache" in told


def test_a_shared_head_is_what_vllm_alone_has_cached() -> None:
    run_cell = pytest.importorskip("ttlcache_sim.cell").run_cell
    turn = Turn(1_000, 10, "bash", 1.0)
    workload = Workload(tuple(Program(f"p{n}", 9.0 * n, (turn,)) for n in range(4)))
    engine = EngineSetting("a100-80", "llama-3.1-8b", 700, 16, 8, 2048)
    spec = WorkloadSpec("swe", 4, rate=1.0, seed=0)
    for shared, hits in ((0, 0), (500, 3 * 496)):
        cell = Cell(ARMS[0], engine, replace(spec, shared_tokens=shared))
        found = run_cell(cell, workload).metrics
        assert found["prompt_hit"] == pytest.approx(hits / 4_000)


@pytest.mark.parametrize("counted", [7, 27, 150])
def test_an_interval_of_few_programs_holds_as_often_as_it_says(counted: int) -> None:
    rng = random.Random(0)

    def run(jct_s: list[float]) -> CellResult:
        others = {"ttft_s": (1.0, 2.0, 3.0), "prompt_hit": 0.5, "held": [True]}
        return CellResult({}, {}, {"jct_s": jct_s, **others})

    def trial() -> bool:
        base = [[rng.lognormvariate(0, 1) for _ in range(counted)] for _ in SEEDS]
        ours = [[0.8 * s * rng.lognormvariate(-0.045, 0.3) for s in b] for b in base]
        (found,) = loads_of([0.1], list(map(run, [*base, *ours])))
        return found.ratio.low <= 0.8 <= found.ratio.high

    assert 0.91 <= sum(trial() for _ in range(200)) / 200 <= 0.99


def estimated(tmp_path: Path, *arguments: str, status: int = 0) -> str:
    return output_of(app, "estimate", tmp_path / "logs", *arguments, status=status)


def test_errors_are_one_line(tmp_path: Path) -> None:
    sample = log_sample("atif.json")
    for text, words, told in (
        (None, (), "logs: no such file or folder"),
        (sample.replace('"source"', '"sauce"'), (), "steps.0.source: Field required"),
        (sample, ("--gpu", "abacus"), "gpu 'abacus': expected one of a100-80, "),
        (sample, ("--profile", "none.json"), "profile none.json: "),
        (sample, ("--blocks", "1"), "0 tokens (the pool, or the model's longest"),
    ):
        if text is not None:
            (tmp_path / "logs").write_text(text)
        output = estimated(tmp_path, *words, status=1)
        assert told in output
        assert "Traceback" not in output


def test_programs_of_one_turn_need_no_simulation(tmp_path: Path) -> None:
    write_trace(tmp_path / "logs", recorded({}))
    told = estimated(tmp_path)
    assert "It will not help: every program of these logs has one turn." in told


def test_from_a_log_to_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "PROCESSES", 1)
    programs = [
        RecordedProgram.model_validate(
            recorded(
                *[{"new_prompt_tokens": 900, "output_tokens": 40, "tool_s": 2.0}] * 4,
                program_id=str(number),
            )
        )
        for number in range(12)
    ]
    write_trace(tmp_path / "logs", *(each.model_dump() for each in programs))
    options = ("--programs", "12", "--blocks", "700", "--out", "o")
    output = estimated(tmp_path, *options)
    told = json.loads((tmp_path / "o" / "estimate.json").read_text())
    assert len(told["loads"]) == 3
    for each in told["loads"]:
        assert 0.0 < each["without"]["mean_jct_s"] < 1e4
        assert 0.0 <= each["with_ttlcache"]["hit"] <= 0.9
    assert "step times: a roofline of a100-80, not measured" in told["told"]
    assert "It pays" in output
    assert (tmp_path / "o" / "estimate.png").read_bytes().startswith(b"\x89PNG")
