"""Trace files: scaling, unknown values, and errors that name the line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.serve.scaled import TraceScale, from_trace
from tests.bench.samples import recorded, write_trace
from ttlcache_sim.load.programs import Program
from ttlcache_sim.load.traces import TraceError


def program(program_id: str, num_turns: int = 3, **turn: Any) -> dict[str, Any]:
    call = {"new_prompt_tokens": 900, "output_tokens": 100, "tool": "bash"}
    call |= {"exe": "ls", "tool_s": 0.5, **turn}
    last = {**call, "tool_s": None}
    return recorded(*[call] * (num_turns - 1), last, program_id=program_id)


@pytest.fixture
def replay(tmp_path):
    """Programs, or lines, as `from_trace` reads them."""

    def read(
        *lines: dict[str, Any] | str, most: int = 9, half: str = "", **scale: Any
    ) -> tuple[Program, ...]:
        path = write_trace(tmp_path / "t.gz", *lines)
        return from_trace(path, most, 1.0, 0, TraceScale(**scale), half)

    return read


def test_one_factor_scales_all_programs_to_the_mean_context(replay):
    # Contexts of 3,000 and 1,000 * 5 tokens: mean 4,000, so the factor is 1/10.
    a, b = replay(program("a", 3), program("b", 5), mean_context_tokens=400)
    assert [(t.new_prompt_tokens, t.output_tokens) for t in a.turns] == [(90, 10)] * 3
    assert (a.context_tokens, b.context_tokens) == (300, 500)
    assert a.arrival_s == 0.0
    assert b.arrival_s > 0.0
    # Small ones are not blown up.
    (a,) = replay(program("a", 2), mean_context_tokens=9000)
    assert a.context_tokens == 2000


def test_the_executable_names_a_shell_call(replay):
    a, b = replay(program("a"), program("b", tool="browser"))
    assert [t.tool for t in a.turns] == ["ls", "ls", ""]
    assert [t.tool for t in b.turns] == ["browser", "browser", ""]


def test_unknown_gaps_become_the_median_and_long_ones_are_capped(replay):
    known = {"a": 0.5, "b": None, "c": 0.7, "d": 60.0}
    lines = [program(name, tool_s=gap_s) for name, gap_s in known.items()]
    programs = replay(*lines, gap_cap_s=3.0)
    assert [p.turns[0].gap_s for p in programs] == [0.5, 0.7, 0.7, 3.0]
    assert all(p.turns[-1].gap_s == 0.0 for p in programs)
    # Without any known one it is the paper's mean.
    (a,) = replay(program("a", tool_s=None))
    assert a.turns[0].gap_s == 0.925


def test_programs_are_cut_to_turns_and_context(replay):
    lines = program("a", 30), program("b", 1)
    (a,) = replay(*lines, max_turns=6)
    assert len(a.turns) == 6
    tight = {"mean_context_tokens": 6000, "max_context_tokens": 2500}
    (a,) = replay(*lines, max_turns=6, **tight)
    assert len(a.turns) == 2
    assert (a.turns[-1].tool, a.turns[-1].gap_s) == ("", 0.0)


@pytest.mark.parametrize(
    ("half", "names"), [("odd", "135"), ("even", "24"), ("", "12345")]
)
def test_the_halves_of_a_trace_are_its_lines(replay, half, names):
    found = replay(*map(program, "12345"), half=half)
    assert "".join(each.program_id for each in found) == names


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", r"t\.gz:2: not JSON"),
        ("[1]", r"t\.gz:2: expected a JSON object, got \[1\]"),
        ('{"turns": []}', r"t\.gz:2: program_id: Field required"),
        ('{"program_id": "x", "turns": []}', r"t\.gz:2: turns: .* at least 1 item"),
        (
            json.dumps(program("x", new_prompt_tokens=-1)),
            r"t\.gz:2: turns\.0\.new_prompt_tokens: .* or equal to 0, got -1",
        ),
        (json.dumps(program("x", tool_s="1")), r"tool_s: .* valid number, got '1'"),
        (json.dumps(program("a")), r"t\.gz:2: program_id 'a' occurs twice"),
    ],
)
def test_bad_lines_are_named(replay, line, message):
    with pytest.raises(TraceError, match=message):
        replay(program("a"), line)
