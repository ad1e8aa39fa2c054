"""The recording of a real server that is killed, and of one whose disk is full."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from bench.serve.server import VLLMServer
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


@dataclass
class Talker(threading.Thread):
    """Turn after turn until the server is gone; when each answer came, by its id."""

    url: str
    number: int
    answers: list[tuple[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    # A thread is hashed by identity; the dataclass would forbid it.
    __hash__ = threading.Thread.__hash__

    def run(self) -> None:
        with contextlib.suppress(httpx.HTTPError):
            while True:
                self.program(len(self.answers))

    def program(self, first: int) -> None:
        """Eight turns of one program, the last one said to be it."""
        hints = {"program_id": f"agent-{self.number}-{first}", "tool": "bash"}
        prompt = [5 + self.number] * 100
        for turn in range(8):
            body = {
                "model": "tiny",
                "prompt": prompt,
                "max_tokens": 4,
                "ignore_eos": True,
                "return_token_ids": True,
                "kv_transfer_params": {"ttlcache": hints | {"is_last_step": turn == 7}},
            }
            url = f"{self.url}/v1/completions"
            response = httpx.post(url, json=body, timeout=HANG_S).raise_for_status()
            answer = response.json()
            self.answers.append((answer["id"], time.monotonic()))
            prompt = [*prompt, *answer["choices"][0]["token_ids"], 9]


def run(*arguments: object) -> str:
    wide = {"COLUMNS": "160"}
    result = CliRunner(env=wide).invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_killed_engine_leaves_all_but_the_last_moment(tiny_model, tmp_path):
    with start(tiny_model, tmp_path) as server:
        process = server._process
        talkers = [Talker(server.base_url, number) for number in range(AGENTS)]
        for talker in talkers:
            talker.start()

        def get_on() -> bool:
            latest_s = time.monotonic() - MAX_LOSS_S - 1
            return all(
                len(t.answers) > 8 and t.answers[8][1] < latest_s for t in talkers
            )

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
    answers = [answer for talker in talkers for answer in talker.answers]
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
    assert "job completion" in run("analyze", folder, "--json", out / "summary.json")
    text = run("explain", programs[0].program, "--from", folder)
    for part in ("turn 8", "claimed a pin", "regret against the best constant"):
        assert part in text
    run("explain", programs[-1].program, "--from", folder)  # cut off by the kill
    run("plot", folder, "--out", out / "plots")
    assert len(list((out / "plots").glob("*.png"))) == 4


def wait_for(agent: Agent, text: str) -> None:
    deadline = time.monotonic() + HANG_S
    turn = 0
    while text not in agent.server.log_path.read_text(errors="replace"):
        assert time.monotonic() < deadline, f"never: {text}"
        # The id goes into the recording, and so fills the disk soon.
        program = f"{turn:04d}-" + "x" * 120
        agent.ask([8] * 40, max_tokens=1, hints={"program_id": program})
        turn += 1


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
