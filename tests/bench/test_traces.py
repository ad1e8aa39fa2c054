"""Trace files: scaling, unknown values, and errors that name the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.sim.load.scaled import TraceScale, from_trace
from bench.sim.load.traces import TraceError
from tests.bench.samples import write_trace

SHARED = Path(__file__).parents[3] / "shared" / "traces"


def program(program_id: str, num_turns: int = 3, **turn: Any) -> dict[str, Any]:
    base = {"new_prompt_tokens": 900, "output_tokens": 100, "tool": "bash"}
    turns = [{**base, "exe": "ls", "tool_s": 0.5, **turn} for _ in range(num_turns)]
    turns[-1]["tool_s"] = None
    return {"program_id": program_id, "arrival_s": None, "turns": turns}


def test_one_factor_scales_all_programs_to_the_mean_context(tmp_path: Path) -> None:
    # Contexts of 3,000 and 1,000 * 5 tokens: mean 4,000, so the factor is 1/10.
    path = write_trace(tmp_path / "t.gz", program("a", 3), program("b", 5))
    a, b = from_trace(path, 10, 1.0, 0, TraceScale(mean_context_tokens=400))
    assert [(t.new_prompt_tokens, t.output_tokens) for t in a.turns] == [(90, 10)] * 3
    assert (a.context_tokens, b.context_tokens) == (300, 500)
    assert a.arrival_s == 0.0
    assert b.arrival_s > 0.0


def test_small_programs_are_not_blown_up(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.gz", program("a", 2))
    (a,) = from_trace(path, 1, 1.0, 0, TraceScale(mean_context_tokens=9000))
    assert a.context_tokens == 2000


def test_the_executable_names_a_shell_call(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.gz", program("a"), program("b", tool="browser"))
    a, b = from_trace(path, 2, 1.0, 0)
    assert [t.tool for t in a.turns] == ["ls", "ls", ""]
    assert [t.tool for t in b.turns] == ["browser", "browser", ""]


def test_unknown_gaps_become_the_median_and_long_ones_are_capped(
    tmp_path: Path,
) -> None:
    path = write_trace(
        tmp_path / "t.gz",
        program("a", tool_s=0.5),
        program("b", tool_s=None),
        program("c", tool_s=0.7),
        program("d", tool_s=60.0),
    )
    programs = from_trace(path, 4, 1.0, 0, TraceScale(gap_cap_s=3.0))
    assert [p.turns[0].gap_s for p in programs] == [0.5, 0.7, 0.7, 3.0]
    assert all(p.turns[-1].gap_s == 0.0 for p in programs)


def test_without_any_known_gap_the_papers_mean_is_used(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.gz", program("a", tool_s=None))
    (a,) = from_trace(path, 1, 1.0, 0)
    assert a.turns[0].gap_s == 0.925


def test_programs_are_cut_to_turns_and_context(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.gz", program("a", 30), program("b", 1))
    (a,) = from_trace(path, 5, 1.0, 0, TraceScale(max_turns=6))
    assert len(a.turns) == 6
    tight = TraceScale(mean_context_tokens=6000, max_turns=6, max_context_tokens=2500)
    (a,) = from_trace(path, 5, 1.0, 0, tight)
    assert len(a.turns) == 2
    assert (a.turns[-1].tool, a.turns[-1].gap_s) == ("", 0.0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", r"t\.gz:2: not JSON"),
        ("[1]", r"t\.gz:2: expected a JSON object, got \[1\]"),
        ('{"turns": []}', r"t\.gz:2: program_id: Field required"),
        ('{"program_id": "x", "turns": []}', r"t\.gz:2: turns: .* at least 1 item"),
        ('{"program_id": "x", "turns": [3]}', r"turns\.0: .* got 3"),
        (
            json.dumps(program("x", new_prompt_tokens=-1)),
            r"t\.gz:2: turns\.0\.new_prompt_tokens: .* or equal to 0, got -1",
        ),
        (json.dumps(program("x", output_tokens="5")), r"output_tokens: .* integer"),
        (json.dumps(program("x", tool_s="1")), r"tool_s: .* valid number, got '1'"),
        (json.dumps(program("x", tool_s=-2)), r"tool_s: .* or equal to 0, got -2"),
        (json.dumps(program("a")), r"t\.gz:2: program_id 'a' occurs twice"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = write_trace(tmp_path / "t.gz", program("a"), line)
    with pytest.raises(TraceError, match=message):
        from_trace(path, 5, 1.0, 0)


def test_unusable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        from_trace(tmp_path / "none.gz", 1, 1.0, 0)
    plain = tmp_path / "plain.gz"
    plain.write_text("{}\n")
    with pytest.raises(TraceError, match="in no known format"):
        from_trace(plain, 1, 1.0, 0)
    cut = tmp_path / "cut.gz"
    cut.write_bytes(write_trace(tmp_path / "t.gz", program("a")).read_bytes()[:-12])
    with pytest.raises(TraceError, match="cannot be read"):
        from_trace(cut, 5, 1.0, 0)
    with pytest.raises(TraceError, match="no program with at least two turns"):
        from_trace(write_trace(tmp_path / "one.gz", program("a", 1)), 1, 1.0, 0)


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/traces is absent")
@pytest.mark.parametrize(
    "name", ["tb_mini_swe_agent", "weka_claude_code", "lmcache_agent_trace"]
)
def test_recorded_traces_can_be_replayed(name: str) -> None:
    scale = TraceScale(max_context_tokens=12_000)
    programs = from_trace(SHARED / f"{name}.jsonl.gz", 12, 0.5, 0, scale)
    assert len(programs) == 12
    assert all(0 < p.context_tokens <= 12_000 for p in programs)
