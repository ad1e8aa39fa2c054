"""From events to explanations: a small story is recorded and read again.

Program "a": turn 1 is pinned and claimed, turn 2's pin expires before turn 3 comes,
turn 3 is its last. Program "b": its pin falls to memory pressure.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ttlcache.analysis.explain import by_tool, verdicts
from ttlcache.analysis.reader import load
from ttlcache.analysis.recording import RecordingError, pinned_over_time
from ttlcache.analysis.summary import Spread, summarize
from ttlcache.cli import app
from ttlcache.telemetry.events import Telemetry
from ttlcache.telemetry.recorder import Recorder
from ttlcache.testing.fake_engine import FakeEngine
from ttlcache.types import Decision

WALL_S = 1_000_000.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "recording"
    head = {"wall_minus_clock_s": WALL_S, "pool_blocks": 16}
    recorder = Recorder(place, head, run="7-1")
    engine = FakeEngine(
        {"policy": "fixed", "policy_options": {"ttl_s": 5.0}},
        pool_blocks=16,
        telemetry=Telemetry(recorder=recorder),
    )
    first = engine.turn("a1", list(range(17)), [90, 91, 92, 93], program="a")
    engine.step(seconds=2.0)
    second = engine.turn("a2", [*first, 1, 2, 3], [94], program="a")
    engine.step(seconds=9.0)
    engine.turn("a3", [*second, 4], [95], program="a", is_last_step=True)
    engine.turn("b1", list(range(200, 230)), [96], program="b")
    engine.step(seconds=1.0)
    engine.turn("c1", list(range(300, 362)), [97], program="c", is_last_step=True)
    engine.controller.telemetry.close()
    return place


def test_programs_turns_and_pins_come_back(folder):
    recording = load(folder)
    assert [log.program for log in recording.programs] == ["a", "b", "c"]
    log = recording.find("a")
    assert (len(log.turns), log.how) == (3, "last_step")
    one, two, three = log.turns
    assert one.arrive_s == WALL_S
    assert (one.relation, two.relation) == ("branches", "continues")
    assert two.gap_s == pytest.approx(2.0)
    assert one.next_gap_s == two.gap_s
    assert one.decided.tool == "tool"
    assert one.decided.ttl_s == 5.0
    assert (one.pin.outcome, one.pin.lived_s) == ("claimed", pytest.approx(2.0))
    assert two.claimed_pin == one.pin.pin
    assert (two.pin.outcome, three.claimed_pin) == ("expired", None)
    assert log.jct_s == pytest.approx(11.0)
    assert recording.find("b").turns[0].pin.outcome == "victim"


def test_every_return_claims_or_says_why_not(folder):
    one, two, three = verdicts(load(folder).find("a"))
    assert one.claim == "first turn: nothing to claim"
    assert two.claim.startswith("claimed pin 1")
    assert three.claim.startswith("pin 2 expired")
    assert "claimed after 2 s" in one.after
    assert three.after == "program over (last_step)"


def test_cost_is_what_was_held_and_what_was_lost(folder):
    one, two, three = verdicts(load(folder).find("a"))
    benefit = one.turn.decided.benefit_s
    # Claimed after 2 s: those seconds. The oracle pays the cheaper of both.
    assert one.cost_s == pytest.approx(2.0)
    assert one.oracle_s == pytest.approx(min(2.0, benefit))
    # Held and lost: the seconds held and the reload.
    held = two.turn.pin.lived_s
    assert two.cost_s == pytest.approx(held + two.turn.decided.benefit_s)
    assert (three.cost_s, three.oracle_s, three.constant_s) == (None, None, None)


def test_the_tables_sum_up_the_turns(folder):
    log = load(folder).find("a")
    whole, tool = by_tool(log)
    assert (whole.name, whole.turns, whole.returned, whole.claimed) == ("all", 2, 2, 1)
    assert (tool.name, tool.turns) == ("tool", 2)
    found = verdicts(log)
    assert whole.cost_s == sum(v.cost_s or 0.0 for v in found)
    assert whole.constant_s == sum(v.constant_s or 0.0 for v in found)
    assert whole.oracle_s <= whole.constant_s <= whole.cost_s


def test_a_pin_that_still_lives_is_not_judged(folder):
    """As in the recording of a killed server."""
    path = next(folder.glob("*.jsonl"))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"unpin"' not in line))
    recording = load(folder)
    assert all(v.cost_s is None for v in verdicts(recording.find("a")))
    assert [group.turns for group in by_tool(recording.find("a"))] == [0]
    levels = pinned_over_time(recording)
    assert levels[-1][1] > 0, "it is held to the end"


def test_the_summary_counts_everything_once(folder):
    summary = summarize(load(folder))
    assert (summary.programs, summary.turns) == (3, 5)
    assert summary.outcomes == {"claimed": 1, "expired": 1, "victim": 1}
    assert summary.jct.count == 3
    assert summary.jct.max == pytest.approx(11.0)
    assert summary.makespan_s == pytest.approx(12.0)
    assert summary.cached_tokens > 0
    assert (summary.claimed_tokens, summary.saved_tokens) == (20, 0)
    assert summary.gaps["tool"].count == 2


def test_statistics_of_nothing_and_of_known_numbers():
    assert Spread.of([]) == Spread()
    spread = Spread.of([float(n) for n in range(1, 101)])
    assert (spread.mean, spread.p50, spread.min, spread.max) == (50.5, 50.5, 1, 100)
    assert spread.p95 == pytest.approx(95.05)


def test_a_recording_cut_off_in_mid_line_is_read_up_to_there(folder):
    path = next(folder.glob("*.jsonl"))
    content = path.read_bytes()
    whole = content.count(b"\n")
    for cut in range(len(content) - 300, len(content), 7):
        path.write_bytes(content[:cut])
        assert load(folder).programs
    odd = b'{"t": 1, "ev": "of another version"}\n[1]\n\xff\n'
    odd += b'{"t": 1, "ev": "arrive"}\n{"t": "x", "ev": "end"}\n{"ev": "unpin"}\n'
    path.write_bytes(content + odd)
    assert len(list(load(folder).turns())) == 5
    assert whole > 20


def test_what_is_no_recording_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    for place in (tmp_path, tmp_path / "absent", tmp_path / "x.json"):
        with pytest.raises(RecordingError):
            load(place)


def test_a_pin_that_shrank_holds_less(folder):
    path = next(folder.glob("*.jsonl"))
    pin = next(x for x in map(json.loads, path.open()) if x.get("ev") == "pin")
    shrunk = {**pin, "ev": "shrink", "kv_blocks": 1, "kv_tokens": 4, "t": pin["t"] + 1}
    with path.open("a") as file:
        file.write(json.dumps(shrunk) + "\n")
    levels = dict(pinned_over_time(load(folder)))
    start_s = WALL_S + pin["t"]
    assert levels[start_s] == pin["kv_blocks"] > 1
    assert levels[start_s + 1] == 1


def run(*arguments: object) -> str:
    wide = {"COLUMNS": "160"}
    result = CliRunner(env=wide).invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_commands_on_a_recording(folder, tmp_path):
    assert "job completion" in run("analyze", folder, "--json", tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text())["programs"] == 3
    text = run("explain", "a", "--from", folder)
    for part in ("turn 3", "claimed pin 1", "regret against the oracle", "last_step"):
        assert part in text
    assert "regret against the best constant" in text
    plain = run("explain", "a", "--from", folder, "--json").splitlines()
    assert json.loads(plain[1])["claimed"] is True
    out = tmp_path / "plots"
    assert run("plot", folder, "--out", out)
    assert {path.name for path in out.glob("*.png")} == {
        "timeline.png",
        "gaps.png",
        "pinned.png",
        "jct.png",
    }
    assert all(path.stat().st_size > 5000 for path in out.glob("*.png"))


@pytest.mark.parametrize(
    "arguments",
    [
        ("analyze", "nowhere"),
        ("explain", "nobody", "--from", "FOLDER"),
    ],
)
def test_mistakes_end_with_a_sentence(arguments, folder):
    arguments = [str(folder) if a == "FOLDER" else a for a in arguments]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "error:" in result.output
    assert "Traceback" not in result.output


#: Markup that closes nothing, a window's title, a colour, a line of its own.
HOSTILE = "[/b]\x1b]0;owned\x07\x1b[31m\nerror"


def rename_tool(place: Path, name: str, new_name: str) -> None:
    """As an older version recorded it, which wrote any text as a tool's name."""
    for path in place.iterdir():
        tool, new_tool = (f'"tool":{json.dumps(n)}' for n in (name, new_name))
        text = path.read_text()
        assert tool in text
        path.write_text(text.replace(tool, new_tool))


def test_ids_and_tools_of_clients_rule_no_terminal(tmp_path):
    place = tmp_path / "recording"
    engine = FakeEngine(
        {"policy": "fixed"},
        telemetry=Telemetry(recorder=Recorder(place, {}, run="1-1")),
    )
    context = engine.turn("r1", list(range(20)), [50], program=HOSTILE, tool=HOSTILE)
    engine.step(seconds=1.0)
    engine.turn("r2", [*context, 1], [51], program=HOSTILE, is_last_step=True)
    engine.controller.telemetry.close()
    rename_tool(place, "unknown_tool", HOSTILE)
    for arguments in (("analyze", place), ("explain", HOSTILE, "--from", place)):
        shown = run(*arguments)
        assert "[/b]" in shown
        assert not {"\x1b", "\x07"} & set(shown)
    nobody = CliRunner().invoke(app, ["explain", "nobody", "--from", str(place)])
    assert nobody.exit_code == 1
    assert "\x1b" not in nobody.output


def test_a_tool_s_name_is_no_formula(tmp_path):
    pytest.importorskip("matplotlib", reason="an extra")
    from ttlcache.analysis import timeline

    name = "$PYTHON_{$ and \\$"
    place = tmp_path / "recording"
    engine = FakeEngine(
        {"policy": "fixed"},
        telemetry=Telemetry(recorder=Recorder(place, {}, run="1-1")),
    )
    context = engine.turn("r1", list(range(20)), [50], program=name, tool=name)
    engine.step(seconds=1.0)
    engine.turn("r2", [*context, 1], [51], program=name)
    engine.controller.telemetry.close()
    rename_tool(place, "unknown_tool", name)
    assert len(timeline.draw_all(load(place), tmp_path / "plots")) == 4


def test_a_live_server_s_ids_and_tools_rule_no_terminal():
    from rich.console import Console

    from ttlcache.cli.top import _screen

    row = {"program": HOSTILE, "tool": HOSTILE, "turns": 1, "running": 0}
    row |= {"gap_s": None, "pins": 0, "pinned_blocks": 0, "ttl_left_s": None}
    console = Console(width=200)
    with console.capture() as shown:
        console.print(_screen([{"programs": [row]}], rows=5))
    assert "[/b]" in shown.get()
    assert not {"\x1b", "\x07"} & set(shown.get())


def test_a_policy_of_somebody_else_may_give_anything_as_inputs(tmp_path):
    recorder = Recorder(tmp_path, {}, run="1-1")
    engine = FakeEngine({"policy": "fixed"}, telemetry=Telemetry(recorder=recorder))
    engine.controller.retention.policy.decide = lambda turn, view: Decision(
        1.0, "odd", {"text": "x" * 999, "inf": float("inf"), 7: None, "n": 1.5}
    )
    engine.turn("r1", list(range(20)), [50], program="p")
    engine.controller.telemetry.close()
    inputs = load(tmp_path).find("p").turns[0].decided.inputs
    assert inputs == {"inf": float("inf"), "n": 1.5}


def test_nothing_secret_is_recorded(folder):
    text = next(folder.glob("*.jsonl")).read_text()
    fields = set().union(*(json.loads(line) for line in text.splitlines()))
    assert not {"tenant", "cache_salt", "text", "tokens_ids"} & fields
    assert "tenant" not in text
