"""How `python -m bench gaps` reads a trace and fills in what it leaves out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from bench.gaps.traces import gap_key, read_gaps
from bench.sim.load.traces import DECODE_S_PER_TOKEN, RecordedTurn, TraceError
from tests.bench.samples import recorded, write_trace
from ttlcache.types import FINAL_GAP, USER_GAP, GapKey


def key(*, is_last: bool = False, **fields: Any) -> GapKey:
    turn = RecordedTurn(new_prompt_tokens=1, output_tokens=1, **fields)
    return gap_key(turn, is_last)


@pytest.mark.parametrize(
    ("turn", "expected"),
    [
        ({"tool": "bash", "exe": "python3", "eff": "python3 <path>.py"}, "python"),
        ({"tool": "bash", "exe": "pip", "eff": "pip install"}, "pip"),
        ({"tool": "bash", "exe": "cat", "eff": "cat <<"}, "cat"),
        ({"tool": "bash", "exe": "tmux", "eff": "tmux <arg>"}, "tmux"),
        ({"tool": "bash", "exe": "make"}, "make"),
    ],
)
def test_masked_commands_give_the_keys_of_real_ones(
    turn: dict[str, Any], expected: str
) -> None:
    assert str(key(**turn)) == f"bash {expected}"


def test_turns_without_a_tool_are_the_users() -> None:
    for tool in ("__user__", "Bash+__user__", "__format_error__", None):
        assert key(tool=tool) == USER_GAP
    assert key(tool="open", eff="open <path>") == GapKey("open")
    assert key(tool="submit") == FINAL_GAP
    assert key(tool="read+search") == GapKey.parallel(
        (GapKey("read"), GapKey("search"))
    )
    echo = {"tool": "bash", "exe": "echo", "eff": "echo <arg>"}
    assert key(**echo) == GapKey("bash", "echo")
    assert key(**echo, is_last=True) == FINAL_GAP


def test_what_a_trace_leaves_out_is_filled_in(tmp_path: Path) -> None:
    path = write_trace(
        tmp_path / "t.gz",
        recorded(
            {"tool_s": 0.5, "llm_s": 2.0, "start_s": 0.0},
            {"tool_s": None, "llm_s": 3.0, "start_s": 2.5},  # 7.5 - 2.5 - 3
            {"tool_s": 1.0, "llm_s": None, "start_s": 7.5},  # 10 - 7.5 - 1
            {"tool_s": None, "llm_s": None, "start_s": 10.0},
            {"tool_s": 9.0},
        ),
    )
    (own,) = read_gaps(path, rate=1.0, seed=0)
    assert [t.gap_s for t in own.turns][:3] == [0.5, 2.0, 1.0]
    assert math.isnan(own.turns[3].gap_s)
    assert own.turns[4].gap_s == math.inf  # nobody came back
    assert [t.llm_s for t in own.turns[:3]] == [2.0, 3.0, 1.5]
    assert own.turns[3].llm_s == pytest.approx(10 * DECODE_S_PER_TOKEN)
    assert [t.prompt_tokens for t in own.turns] == [90, 190, 290, 390, 490]


def test_recorded_arrivals_order_the_programs(tmp_path: Path) -> None:
    gap = ({"tool_s": 1.0}, {})
    path = write_trace(
        tmp_path / "t.gz",
        recorded(*gap, program_id="late", arrival_s=50.0),
        recorded(*gap, program_id="early", arrival_s=5.0),
    )
    assert [p.program_id for p in read_gaps(path, 1.0, 0)] == ["early", "late"]
    path = write_trace(
        tmp_path / "u.gz",
        recorded(*gap, program_id="a", arrival_s=50.0),
        recorded(*gap, program_id="b"),
    )
    one, two = read_gaps(path, 1.0, 0), read_gaps(path, 1.0, 1)
    assert one == read_gaps(path, 1.0, 0)
    assert (one[0].arrival_s, one[0].program_id) == (0.0, "a")
    assert one[1].arrival_s != two[1].arrival_s


def test_useless_traces_are_named(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.gz", recorded({}, {}))
    with pytest.raises(TraceError, match="not one known gap"):
        read_gaps(path, 1.0, 0)
    with pytest.raises(ValueError, match="rate must be positive"):
        read_gaps(path, 0.0, 0)
