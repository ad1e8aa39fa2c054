"""From events to explanations: a small story is recorded and read again.

Program "a": turn 1 is pinned and claimed, turn 2's pin expires before turn 3 comes,
turn 3 is its last. Program "b": its pin falls to memory pressure.
"""

import json
from functools import partial

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.commands import output_of
from tests.fake_engine import FakeEngine
from ttlcache.analysis import timeline
from ttlcache.analysis.reader import load
from ttlcache.analysis.recording import (
    PinLog,
    ProgramLog,
    Recording,
    RecordingError,
    TurnLog,
    pinned_over_time,
)
from ttlcache.analysis.summary import summarize
from ttlcache.cli.main import app
from ttlcache.cli.top import _screen
from ttlcache.telemetry.events import Telemetry
from ttlcache.telemetry.recorder import Recorder
from ttlcache.types import Decision, PinOutcome

WALL_S = 1_000_000.0
run = partial(output_of, app)


def recording_engine(place, **header):
    telemetry = Telemetry(recorder=Recorder(place, header, run="7-1"))
    config = {"policy": "fixed", "policy_options": {"ttl_s": 5.0}}
    return FakeEngine(config, pool_blocks=16, telemetry=telemetry)


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "recording"
    engine = recording_engine(place, wall_minus_clock_s=WALL_S, pool_blocks=16)
    first = engine.turn("a1", list(range(17)), [90, 91, 92, 93], program="a")
    engine.step(seconds=2.0)
    second = engine.turn("a2", [*first, 1, 2, 3], [94], program="a")
    engine.step(seconds=9.0)
    engine.turn("a3", [*second, 4], [95], program="a", is_last_step=True)
    engine.turn("b1", list(range(200, 230)), [96], program="b", tenant="hush")
    engine.step(seconds=1.0)
    engine.turn("c1", list(range(300, 362)), [97], program="c", is_last_step=True)
    engine.controller.telemetry.close()
    return place


@pytest.fixture
def file(folder):
    return next(folder.glob("*.jsonl"))


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


def test_a_new_job_under_the_id_of_an_ended_one_is_another(tmp_path):
    engine = recording_engine(tmp_path)
    for number in range(2):
        context = [*range(100 * number, 100 * number + 17)]
        engine.turn(f"a{number}", context, [90], program="a", is_last_step=True)
        engine.step(seconds=90.0)
    engine.controller.telemetry.close()
    jobs = load(tmp_path).programs
    assert [(log.program, len(log.turns)) for log in jobs] == [("a", 1), ("a", 1)]
    assert max(log.jct_s for log in jobs) < 90.0


def test_a_pin_that_still_lives_is_held_to_the_end(folder, file):
    """As in the recording of a killed server."""
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if '"unpin"' not in line))
    levels = pinned_over_time(load(folder))
    assert levels[-1][1] > 0


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


def test_a_recording_cut_off_in_mid_line_is_read_up_to_there(folder, file):
    content = file.read_bytes()
    assert content.count(b"\n") > 20
    for cut in range(len(content) - 300, len(content), 7):
        file.write_bytes(content[:cut])
        assert load(folder).programs
    odd = b'{"t": 1, "ev": "of another version"}\n[1]\n\xff\n'
    odd += b'{"t": 1, "ev": "arrive"}\n{"t": "x", "ev": "end"}\n{"ev": "unpin"}\n'
    file.write_bytes(content + odd)
    assert len(list(load(folder).turns())) == 5


def test_what_is_no_recording_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    for place in (tmp_path, tmp_path / "absent", tmp_path / "x.json"):
        with pytest.raises(RecordingError):
            load(place)


def test_a_pin_that_shrank_holds_less(folder, file):
    pin = next(x for x in map(json.loads, file.open()) if x.get("ev") == "pin")
    shrunk = {**pin, "ev": "shrink", "kv_blocks": 1, "t": pin["t"] + 1}
    with file.open("a") as end:
        end.write(json.dumps(shrunk) + "\n")
    levels = dict(pinned_over_time(load(folder)))
    start_s = WALL_S + pin["t"]
    assert levels[start_s] == pin["kv_blocks"] > 1
    assert levels[start_s + 1] == 1


def test_the_commands_on_a_recording(folder, tmp_path):
    assert "job completion" in run("report", folder)
    text = run("explain", "a", "--from", folder)
    parts = ("turn 3", "first turn: nothing to claim", "claimed after 2 s")
    parts += ("claimed pin 1", "pin 2 expired", "program over (last_step)")
    parts += ("held in vain", "found the pin")
    for part in parts:
        assert part in text
    assert run("plot", folder, "--out", tmp_path / "plots")
    plots = list((tmp_path / "plots").glob("*.png"))
    assert {plot.stem for plot in plots} == {"timeline", "gaps", "pinned", "jct"}
    assert all(plot.stat().st_size > 5000 for plot in plots)
    for mistake in (("report", "nowhere"), ("explain", "nobody", "--from", folder)):
        output = run(*mistake, status=1)
        assert "error:" in output
        assert "Traceback" not in output


def test_a_recording_reads_well_on_80_columns(folder):
    for path in folder.iterdir():  # a tool and a reason of the longest kind
        path.write_text(path.read_text().replace('"tool":"tool"', '"tool":"bash npx"'))
    narrow = CliRunner(env={"COLUMNS": "80"})
    for command in (["report"], ["explain", "a", "--from"]):
        done = narrow.invoke(app, [*command, str(folder)])
        assert done.exit_code == 0, done.output
        lines = done.output.splitlines()
        assert max(map(len, lines)) <= 80
        assert "…" not in done.output


def test_the_live_programs_read_well_on_80_columns():
    ids = ["anonymous-3f9a12-128", "anonymous-3f9a12-129"]
    ids += [f"57a121ec-f78c-4ad2-8a31-{'0' * 11}{end}" for end in "12"]
    numbers = {"turns": 128, "running": 16, "waiting": 16, "gap_s": 1234.5, "pins": 16}
    numbers |= {"pinned_blocks": 123456, "ttl_left_s": 299.9, "tool": "bash pytest"}
    gauges = {"programs_active": 4, "pool_blocks": 200_000}
    totals = {f"pins:{name}": 12345 for name in PinOutcome}
    engine = {"programs": [{"program": each, **numbers} for each in ids]}
    console = Console(width=80)
    with console.capture() as captured:
        console.print(_screen([engine | {"gauges": gauges, "totals": totals}], rows=9))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 80
    first = [line for line in lines if line.startswith(("anonymous-", "57a121ec-"))]
    assert len(first) == len(ids)
    for row in first:
        for part in ("bash pytest", "128", "1234 s", "123456", "300 s"):
            assert part in row
    shown = "".join(line.split()[0] for line in lines)
    for program in ids:  # whole, over two lines if need be
        assert program in shown


#: Markup that closes nothing, a window's title, a colour, a line of its own.
HOSTILE = "[/b]\x1b]0;owned\x07\x1b[31m\nerror"


def recording_of_hostile(place, name):
    """A program and its tool have this name."""
    engine = recording_engine(place)
    context = engine.turn("r1", list(range(20)), [50], program=name, tool=name)
    engine.step(seconds=1.0)
    engine.turn("r2", [*context, 1], [51], program=name, is_last_step=True)
    engine.controller.telemetry.close()
    # As an older version recorded it, which wrote any text as a tool's name.
    (path,) = place.iterdir()
    tool, hostile = (f'"tool":{json.dumps(n)}' for n in ("unknown_tool", name))
    assert tool in path.read_text()
    path.write_text(path.read_text().replace(tool, hostile))
    return place


def test_ids_and_tools_of_clients_rule_no_terminal(tmp_path):
    place = recording_of_hostile(tmp_path / "recording", HOSTILE)
    for arguments in (("report", place), ("explain", HOSTILE, "--from", place)):
        shown = run(*arguments)
        assert "[/b]" in shown
        assert not {"\x1b", "\x07"} & set(shown)
    assert "\x1b" not in run("explain", "nobody", "--from", place, status=1)


def test_a_tool_s_name_is_no_formula(tmp_path):
    place = recording_of_hostile(tmp_path / "recording", "$PYTHON_{$ and \\$")
    run("plot", place, "--out", tmp_path / "plots")
    assert len(list((tmp_path / "plots").glob("*.png"))) == 4


def test_a_live_server_s_ids_and_tools_rule_no_terminal():
    row = {"program": HOSTILE, "tool": HOSTILE, "turns": 1, "running": 0, "waiting": 0}
    row |= {"gap_s": None, "pins": 0, "pinned_blocks": 0, "ttl_left_s": None}
    console = Console(width=200)
    with console.capture() as shown:
        console.print(_screen([{"programs": [row]}], rows=5))
    assert "[/b]" in shown.get()
    assert not {"\x1b", "\x07"} & set(shown.get())


def test_a_policy_of_somebody_else_may_give_anything_as_inputs(tmp_path):
    engine = recording_engine(tmp_path)
    engine.controller.retention.policy.decide = lambda turn, view: Decision(
        1.0, "odd", {"text": "x" * 999, "inf": float("inf"), 7: None, "n": 1.5}
    )
    engine.turn("r1", list(range(20)), [50], program="p")
    engine.controller.telemetry.close()
    inputs = load(tmp_path).find("p").turns[0].decided.inputs
    assert inputs == {"inf": float("inf"), "n": 1.5}


def test_nothing_secret_is_recorded(file):
    fields = set().union(*(json.loads(line) for line in file.open()))
    assert not {"tenant", "cache_salt", "text", "token_ids"} & fields
    assert "hush" not in file.read_text()


@pytest.mark.parametrize(
    ("next_gap_s", "kind"), [(25.0, "pinned in vain"), (None, "pinned, no next turn")]
)
def test_idle_memory_and_final_turns_have_colours_of_their_own(next_gap_s, kind):
    """The pin lives from 10 to 30; a request lacked memory from 15 to 20."""
    waits = TurnLog(2, 12.0, admit_s=20.0, memory_wait_s=5.0)
    held = TurnLog(1, 8.0, admit_s=8.0, finish_s=10.0, next_gap_s=next_gap_s)
    held.pin = PinLog(1, 10.0, 4, "expired", 30.0)
    log = ProgramLog("held", "run", [held])
    recording = Recording([log, ProgramLog("waits", "run", [waits])], {"run": {}})
    wanted = recording.wanted("run")
    assert wanted == [(15.0, 20.0)]
    bars = timeline.spans_of(log, wanted, origin_s=0.0)
    assert bars[kind] == [(15.0, 5.0)]
    assert bars["idle memory, pinned"] == [(10.0, 20.0)]
    summary = summarize(recording)
    assert (summary.wasted_block_s, summary.idle_block_s) == (20.0, 60.0)
    outcome = "no_return" if next_gap_s is None else "expired"
    assert summary.outcomes == {outcome: 1}
    # What is drawn over idle memory can be seen.
    kinds = list(timeline.COLOURS)
    assert kinds.index("idle memory, pinned") < kinds.index(kind)
