"""The recording of a real server that is killed, and of one whose disk is full."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import resource
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from bench.serve.server import VLLMServer
from tests.commands import output_of
from tests.e2e.conftest import HANG_S, Agent, engine_pid, start_server
from tests.waiting import becomes
from ttlcache.analysis.reader import load
from ttlcache.cli import app

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]
log = logging.getLogger(__name__)

AGENTS = 3
#: The recorder writes every 0.25 s. Twenty times that is a fault on any machine.
MAX_LOSS_S = 5.0


def start(model: Path, folder: Path) -> VLLMServer:
    extra = {
        "policy": "fixed",
        "policy_options": {"ttl_s": 30.0},
        "record_path": str(folder / "recording"),
    }
    return start_server(model, folder / "server.log", extra)


def talk(agent: Agent, number: int, answers: list[tuple[str, float]]) -> None:
    """Programs of eight turns until the server is gone; ids and times of answers."""
    # An answer that is not 200 fails `ask`: the engine is gone, its server not yet.
    with contextlib.suppress(httpx.HTTPError, AssertionError):
        while True:
            hints = {"program_id": f"agent-{number}-{len(answers)}", "tool": "bash"}
            prompt = [5 + number] * 100
            for turn in range(8):
                hints["is_last_step"] = turn == 7
                answer = agent.ask(prompt, max_tokens=4, hints=hints)
                answers.append((answer["request_id"], time.monotonic()))
                prompt = [*answer["context"], 9]


def test_a_killed_engine_leaves_all_but_the_last_moment(tiny_model, tmp_path):
    answered: list[list[tuple[str, float]]] = [[] for _ in range(AGENTS)]
    with start(tiny_model, tmp_path) as server:
        process = server._process
        talkers = [
            threading.Thread(target=talk, args=(Agent(server), number, answers))
            for number, answers in enumerate(answered)
        ]
        for talker in talkers:
            talker.start()

        def get_on() -> bool:
            latest_s = time.monotonic() - MAX_LOSS_S - 1
            return all(len(own) > 8 and own[8][1] < latest_s for own in answered)

        assert becomes(get_on, HANG_S), "the agents do not get on"
        os.kill(engine_pid(server), signal.SIGKILL)
        killed_s = time.monotonic()
        for talker in talkers:
            talker.join(HANG_S)
            assert not talker.is_alive()
        process.wait(HANG_S)
    folder = tmp_path / "recording"
    whole, cut = complete_lines(folder)
    assert len(cut) <= 1, "a line that is no JSON in mid-file"
    finished = {
        turn.request for _, turn in load(folder).turns() if turn.finish_s is not None
    }
    answers = [answer for own in answered for answer in own]
    lost = [
        killed_s - came_s
        for name, came_s in answers
        if not any(request.startswith(name) for request in finished)
    ]
    log.info("%d lines, %d answers, lost: %s s", whole, len(answers), sorted(lost))
    assert len(lost) < len(answers)
    assert max(lost, default=0.0) < MAX_LOSS_S
    commands_read(folder, tmp_path)


def complete_lines(folder: Path) -> tuple[int, list[str]]:
    """How many lines are JSON; those that are not."""
    whole, cut = 0, []
    for path in sorted(folder.glob("events-*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                json.loads(line)
                whole += 1
            except ValueError:
                cut.append(line)
    return whole, cut


def commands_read(folder: Path, out: Path) -> None:
    """Every command, on the recording as the killed server left it."""
    programs = load(folder).programs
    summary = out / "summary.json"
    assert "job completion" in output_of(app, "analyze", folder, "--json", summary)
    text = output_of(app, "explain", programs[0].program, "--from", folder)
    for part in ("turn 8", "claimed a pin", "regret against the best constant"):
        assert part in text
    cut_off = programs[-1].program  # by the kill
    output_of(app, "explain", cut_off, "--from", folder)
    output_of(app, "plot", folder, "--out", out / "plots")
    assert len(list((out / "plots").glob("*.png"))) == 4


def wait_for(agent: Agent, text: str) -> None:
    """Turns until the log has it; their ids, which are recorded, fill a disk soon."""
    numbers = itertools.count()

    def is_told() -> bool:
        program = f"{next(numbers):04d}-" + "x" * 120
        agent.ask([8] * 40, max_tokens=1, hints={"program_id": program})
        return text in agent.server.log_path.read_text(errors="replace")

    assert becomes(is_told, HANG_S), f"never: {text}"


def test_a_full_disk_stops_the_recording_alone_and_until_there_is_room(
    tiny_model, tmp_path
):
    with start(tiny_model, tmp_path) as server:
        agent = Agent(server)
        before = agent.ask([7] * 100, hints={"program_id": "before"})
        # No file of the engine grows beyond this: what a full disk does, for one
        # process. Its log must still have room for the warning.
        limit = server.log_path.stat().st_size + 32_768
        engine = engine_pid(server)
        unlimited = resource.prlimit(engine, resource.RLIMIT_FSIZE)
        resource.prlimit(engine, resource.RLIMIT_FSIZE, (limit, unlimited[1]))
        wait_for(agent, "waits until it can be written: [Errno 27]")
        after = agent.ask([7] * 100, hints={"program_id": "after"})
        assert after["token_ids"] == before["token_ids"]
        context = [*after["context"], 9]
        claimed = agent.pins("claimed")
        agent.ask(context, hints={"program_id": "after", "is_last_step": True})
        assert agent.pins("claimed") == claimed + 1
        resource.prlimit(engine, resource.RLIMIT_FSIZE, unlimited)
        wait_for(agent, "recording goes on")
        assert agent.count("ttlcache_recorder_dropped_events") == 0
        assert agent.count("ttlcache_hook_errors_total") == 0
    folder = tmp_path / "recording"
    assert complete_lines(folder)[1] == []
    assert load(folder).find("before") is not None
    assert load(folder).find("after") is not None
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.iterdir())
