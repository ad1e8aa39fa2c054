"""Every format of logs on a sample of it; what is missing, wrong or packed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.bench.samples import log_sample, record_job
from ttlcache_sim.load.readers import read_paths, read_programs
from ttlcache_sim.load.readers.model_calls import Usage
from ttlcache_sim.load.traces import RecordedProgram, TraceError
from ttlcache_sim.load.workload import WorkloadSpec, build

#: New prompt tokens, output tokens, tool or program of the shell, seconds.
Row = tuple[int, int, str | None, float | None]
COUNTED: list[Row] = [(1000, 50, "pytest", 4.0), (50, 60, "Read", 0.5)]
LAST = (140, 70)
REQUESTS = log_sample("requests.jsonl")


def programs(tmp_path: Path, name: str, text: str) -> list[RecordedProgram]:
    path = tmp_path / name
    path.write_text(text)
    return list(read_programs(path))


def rows_of(program: RecordedProgram) -> list[Row]:
    return [
        (t.new_prompt_tokens, t.output_tokens, t.exe or t.tool, t.tool_s)
        for t in program.turns
    ]


def with_tool(name: str, seconds: tuple[float, float] = (4.0, 0.5)) -> list[Row]:
    (first, _), (second, _) = ((row[:3], row[3]) for row in COUNTED)
    return [(*first, seconds[0]), (*second[:2], name, seconds[1])]


@pytest.mark.parametrize(
    ("reader", "text", "expected"),
    [
        ("Claude Code", log_sample("claude-code.jsonl"), COUNTED),
        ("Codex", log_sample("codex.jsonl"), COUNTED),
        # Answers' times: less 20 ms for each token of the next one.
        ("ATIF", log_sample("atif.json"), with_tool("Read", (4.8, 0.6))),
        ("mini-swe-agent", log_sample("mini-swe-agent.json"), with_tool("cat")),
        (
            "OpenHands",
            log_sample("openhands-early.jsonl"),
            with_tool("str_replace_editor"),
        ),
        ("request log", log_sample("requests.jsonl"), COUNTED),
        ("request log", '{"input": ""}\n' + log_sample("requests.jsonl"), COUNTED),
    ],
)
def test_formats_with_counts(
    tmp_path: Path, reader: str, text: str, expected: list[Row]
) -> None:
    found = programs(tmp_path, "log", text)[0]
    rows = rows_of(found)
    assert [row[:3] for row in rows[:2]] == [row[:3] for row in expected]
    assert [row[3] for row in rows[:2]] == pytest.approx([row[3] for row in expected])
    assert (rows[2][:2], rows[2][3], len(rows)) == (LAST, None, 3)
    assert not any("tokens" in turn.estimated for turn in found.turns)
    assert read_paths([tmp_path]).formats == {reader: 1}


def test_subagents_are_programs_of_their_own(tmp_path: Path) -> None:
    nested, own = programs(tmp_path, "k.json", log_sample("kv-cache-tester.json"))
    assert (nested.program_id, own.program_id) == ("k-1/b", "k-1")
    assert [row[3] for row in rows_of(own)] == [4.0, 0.5, None]
    assert [turn.tool for turn in own.turns] == ["tool"] * 3
    lines = log_sample("claude-code.jsonl").splitlines()
    side = [
        line.replace('"isSidechain": false', '"isSidechain": true') for line in lines
    ]
    # Lines of a side chain without an agent's id hang on its first line.
    side = [line.replace('"parentUuid": null', '"parentUuid": "u0"') for line in side]
    both = programs(tmp_path, "both.jsonl", "\n".join([*lines, *side]))
    assert [program.program_id for program in both] == ["s-1", "s-1/u0"]
    assert rows_of(both[0]) == rows_of(both[1])


@pytest.mark.parametrize(
    ("text", "names", "seconds"),
    [
        (log_sample("codex-without-counts.jsonl"), ["pytest", "Read"], [4.0, 0.5]),
        (log_sample("mini-swe-agent-1.json"), ["pytest", "cat"], [None, None]),
        (log_sample("swe-agent.json"), ["pytest", "open"], [4.0, 0.5]),
        (log_sample("openhands-events.json"), ["pytest", "file_editor"], [4.0, 0.5]),
        # Whole seconds.
        (log_sample("vllm.log"), ["pytest", "pytest"], [4.0, 0.0]),
        # No answers: 250 tokens at 20 ms.
        (log_sample("requests-without-counts.jsonl"), [None, None], [1.0, 0.0]),
    ],
)
def test_formats_without_counts(
    tmp_path: Path, text: str, names: list[str | None], seconds: list[float | None]
) -> None:
    """Prompts have 4,000 characters, later ones some 400 more."""
    if '"request"' in text:
        text = text.replace('"end_time"', '"other_time"')
    (found, *_) = programs(tmp_path, "log", text)
    rows = rows_of(found)
    assert all("tokens" in turn.estimated for turn in found.turns)
    assert [row[2] for row in rows[:2]] == names
    assert [row[3] for row in rows[:2]] == seconds
    assert rows[0][0] == pytest.approx(1000, rel=0.05)


def test_the_files_of_a_conversation_are_one_log(tmp_path: Path) -> None:
    home = tmp_path / "conversation"
    (home / "events").mkdir(parents=True)
    for number, event in enumerate(json.loads(log_sample("openhands-events.json"))):
        path = home / "events" / f"event-{number:05d}-ab12.json"
        path.write_text(json.dumps(event))
    (home / "base_state.json").write_text(log_sample("openhands-state.json"))
    (found,) = read_programs(tmp_path)
    assert found.program_id == "conversation"
    assert rows_of(found)[:2] == with_tool("file_editor")
    assert rows_of(found)[2][:2] == LAST


def test_our_own_recording(tmp_path: Path) -> None:
    (found,) = read_programs(record_job(tmp_path))
    (first, second) = rows_of(found)
    assert (found.program_id, first[0], first[2]) == ("job-17", 20, "pytest")
    assert (first[3], second[0]) == (pytest.approx(1.0, abs=0.2), 1)


def test_a_compacted_context_is_a_new_program(tmp_path: Path) -> None:
    requests = [
        {"t": 10.0 * n, "in": tokens, "out": 10}
        for n, tokens in enumerate((1000, 990, 2000, 300, 400))
    ]
    text = json.dumps({"id": "k", "block_size": 64, "requests": requests})
    first, second = programs(tmp_path, "k.json", text)
    assert second.program_id == "k#2"
    # 990 after a context of 1010: reasoning was dropped.
    assert [t.new_prompt_tokens for t in first.turns] == [1000, 1, 979]
    assert [t.new_prompt_tokens for t in second.turns] == [300, 90]


def test_files_are_packed_or_not_and_found_in_folders(tmp_path: Path) -> None:
    text = log_sample("claude-code.jsonl")
    (tmp_path / "a.jsonl").write_text(text)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "notes.txt").write_text("none of it")
    reading = read_paths([tmp_path])
    assert [p.program_id for p in reading.programs] == ["s-1", "s-1 (2)"]
    assert reading.unknown == [tmp_path / "notes.txt"]
    with pytest.raises(TraceError, match=r"notes\.txt: in no known format \(trace, "):
        read_paths([tmp_path / "notes.txt"])
    # The last line may be half written, others may not.
    (tmp_path / "a.jsonl").write_text(text + '{"type": "us')
    assert len(read_paths([tmp_path / "a.jsonl"]).programs) == 1


def test_a_broken_file_in_a_folder_is_left_out_and_said(tmp_path: Path) -> None:
    (tmp_path / "a.traj").write_text(log_sample("swe-agent.json"))
    (tmp_path / "b.jsonl").write_text('{"type": "user"}\n{"type": {"type"\n{}\n')
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b"{}" * 99)[:-9])
    (tmp_path / "d.json").write_text("[" * 100_000)
    (tmp_path / "e.json").write_text('{"type": "session_meta", "payload": {}}')
    (tmp_path / "e.jsonl").write_text('{"type": "response_item"}')
    (tmp_path / "schema.json").write_text('{"type": ["object"]}')
    found = read_paths([tmp_path])
    assert len(found.programs) == 1
    assert [path.name for path in found.unknown] == ["schema.json"]
    assert [Path(told.split(":")[0]).name for told in found.broken] == [
        "b.jsonl",
        "c.jsonl.gz",
        "d.json",
        "e.jsonl",
    ]
    with pytest.raises(TraceError, match=r"b\.jsonl:2: not JSON"):
        read_paths([tmp_path / "b.jsonl"])


def _line(turn: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": "x" * 400}] * (turn + 1)
    counts = {"prompt_tokens": 1000.0 * (turn + 1), "completion_tokens": 50}
    return {"messages": messages, "ts": 10.0 * turn, "usage": counts}


def _as_text(turn: int) -> dict[str, Any]:
    line = _line(turn)
    answer = json.dumps({"usage": line.pop("usage")})
    return line | {"messages": json.dumps(line["messages"]), "response": answer}


def _chained(turn: int) -> dict[str, Any]:
    before = f"r{turn - 1}" if turn else None
    answer = {"id": f"r{turn}", "usage": _line(turn)["usage"]}
    return {"input": "go on", "previous_response_id": before, "response": answer}


@pytest.mark.parametrize(
    ("line", "gap_s"),
    [
        (lambda turn: _line(turn) | {"latency_ms": 8000, "user": 7}, 2.0),
        (lambda turn: _line(turn) | _line(turn)["usage"] | {"usage": None}, 9.0),
        (lambda turn: _line(turn) | {"ts": f"{10.0 * turn}"}, 9.0),
        (_as_text, 9.0),
        (_chained, None),
    ],
)
def test_requests_as_proxies_log_them(
    tmp_path: Path, line: Callable[[int], dict[str, Any]], gap_s: float | None
) -> None:
    lines = [json.dumps(line(turn)) for turn in range(3)]
    (found,) = programs(tmp_path, "log", "\n".join(lines))
    assert [turn.new_prompt_tokens for turn in found.turns] == [1000, 950, 950]
    assert found.turns[0].tool_s == gap_s


def test_what_a_cache_had_counts_once() -> None:
    """Anthropic tells it beside the prompt's tokens, LiteLLM of them."""
    cached = {"cache_read_input_tokens": 900, "cache_creation_input_tokens": 80}
    for usage in ({"input_tokens": 20}, {"prompt_tokens": 1000}):
        found = Usage.model_validate(usage | cached)
        assert (found.whole_prompt, found.cached_tokens) == (1000, 900)


def test_zstd_needs_its_library(tmp_path: Path) -> None:
    path = tmp_path / "rollout.jsonl.zst"
    if find_spec("zstandard") is None:
        path.write_bytes(b"\x28\xb5\x2f\xfd\x00")
        with pytest.raises(TraceError, match=r"zst: is zstd: pip install zstandard"):
            read_programs(path)
        return
    zstandard = import_module("zstandard")
    path.write_bytes(zstandard.compress(log_sample("codex.jsonl").encode()))
    assert len(list(read_programs(path))) == 1


#: How a request of the other agent begins.
OTHER = '[{"role": "user", "content": "o'


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        (
            *("claude-code.jsonl", '"output_tokens": 50', '"output_tokens": "x"'),
            r"log:4: message\.usage\.\w+: .* got 'x'",
        ),
        (
            *("codex.jsonl", '"input_tokens": 1100', '"input_tokens": -1'),
            r"log:\d+: payload\.info\.last_token_usage\.\w+: .* got -1",
        ),
        (
            *("atif.json", '"source": "user",', ""),
            r"log: steps\.0\.source: Field required",
        ),
        (
            *("mini-swe-agent.json", '"timestamp": 2.0', '"timestamp": {}'),
            r"log: messages\.2\.extra\.timestamp: .* ISO 8601",
        ),
        (
            *("swe-agent.json", '"execution_time": 4.0', '"execution_time": "4"'),
            r"log: trajectory\.0\.execution_time: .* got '4'",
        ),
        (
            *("openhands-early.jsonl", "2026-03-01T10:00:02.000Z", "yesterday"),
            r"log:1: timestamp: .*, got 'yesterday'",
        ),
        (
            *("kv-cache-tester.json", '"in": 1000, ', ""),
            r"log:1: requests\.0: in: Field required",
        ),
        (
            *("requests.jsonl", '"start_time": 6.0', '"start_time": "noon"'),
            r"log:3: start_time: .*, got 'noon'",
        ),
        (
            *("requests.jsonl", f'"messages": {OTHER}', f'"o": {OTHER}'),
            r"log:2: messages or input or prompt: expected",
        ),
        ("requests.jsonl", "other 0", "redacted-by-litellm", "log:2: LiteLLM has left"),
        ("vllm-without-prompts.log", "", "", r"log:2: prompt: not in the log"),
        ("claude-code.jsonl", "\n", "\n{\n", r"log:2: not JSON"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, name: str, old: str, new: str, message: str
) -> None:
    text = log_sample(name)
    assert old in text
    with pytest.raises(TraceError, match=message):
        programs(tmp_path, "log", text.replace(old, new) if old else text)


@pytest.mark.parametrize(
    "name", ["claude-code.jsonl", "mini-swe-agent.json", "vllm.log"]
)
def test_raw_logs_are_workloads(tmp_path: Path, name: str) -> None:
    path = tmp_path / "log"
    path.write_text(log_sample(name))
    spec: dict[str, Any] = {"programs": 2, "rate": 1.0, "seed": 0}
    workload = build(WorkloadSpec(f"trace:{path}", **spec))
    assert [len(program.turns) for program in workload.programs] == [3, 3]
    assert workload.programs[0].turns[0].tool == "pytest"
