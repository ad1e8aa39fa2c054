"""The server's end, by SIGTERM and by the death of its engine."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from bench.serve.server import VLLMServer
from tests.commands import output_of
from tests.e2e.conftest import HANG_S, Agent, engine_pid, start_server
from tests.e2e.loads import completion
from tests.waiting import becomes
from ttlcache.cli.main import app

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]
log = logging.getLogger(__name__)

#: Seconds that the tool takes.
GAP_S = 0.3
#: Turns under way at the end; together they fit the pool.
TURNS = 3
TURN_TOKENS = 600
#: How long vLLM may drain: longer than the turns take anywhere.
DRAIN_S = int(HANG_S)


def start(model: Path, log_path: Path) -> VLLMServer:
    extra = {
        "policy": "fixed",
        "policy_options": {"ttl_s": 60.0},
        "record_path": str(log_path.parent / "recording"),
    }
    drain = ("--shutdown-timeout", str(DRAIN_S))
    return start_server(model, log_path, extra, extra_args=drain)


class Turn(threading.Thread):
    """A streamed turn; `tokens` grows while it is answered."""

    def __init__(self, url: str, index: int) -> None:
        super().__init__(daemon=True)
        self.url = url
        hints = {"program_id": f"running-{index}"}
        self.body = completion([5 + index] * 64, hints, TURN_TOKENS) | {"stream": True}
        self.tokens = 0

    def run(self) -> None:
        url = f"{self.url}/v1/completions"
        with (
            contextlib.suppress(httpx.TransportError),
            httpx.stream("POST", url, json=self.body, timeout=HANG_S) as response,
        ):
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    choices = json.loads(line.removeprefix("data: ")).get("choices")
                    self.tokens += sum(len(c["token_ids"]) for c in choices or ())


def one_gap(agent: Agent, name: str) -> None:
    """A program of two turns with a tool call between them."""
    hints = {"program_id": name, "tool": "pytest", "ttl": "5m"}
    first = agent.ask([7] * 100, hints=hints)
    time.sleep(GAP_S)
    last = {"program_id": name, "is_last_step": True}
    agent.ask([*first["context"], 8, 9], hints=last)


class Busy:
    """Turns under way, and /metrics scraped in a loop and once after the end."""

    def __init__(self, url: str, turns: list[Turn]) -> None:
        self.url, self.turns = url, turns
        self.scrapes: list[str] = []
        self.stop = threading.Event()
        self.scraper = threading.Thread(target=self.scrape, daemon=True)
        self.scraper.start()

    def scrape(self) -> None:
        is_last = False
        while not is_last:
            is_last = self.stop.is_set()
            try:
                answer = httpx.get(f"{self.url}/metrics", timeout=HANG_S)
                self.scrapes.append(str(answer.status_code))
            except httpx.TransportError as error:
                self.scrapes.append(type(error).__name__)
            self.stop.wait(0.05)

    def nothing_hangs(self) -> None:
        """Everybody was answered or told off; the scraper ends up without a server."""
        self.stop.set()
        for thread in (*self.turns, self.scraper):
            thread.join(HANG_S)
            assert not thread.is_alive()
        log.info("scrapes: %s", Counter(self.scrapes))
        assert self.scrapes[-1] == "ConnectError"
        assert not any("Timeout" in end for end in self.scrapes)


def freeze_in_mid_turn(agent: Agent) -> Busy:
    """The engine stands still (SIGSTOP) with every turn begun and none done.

    Only so is "under way" true on machines of any speed.
    """
    hints = {"program_id": "pinned", "tool": "pytest", "ttl": "5m"}
    agent.ask([9] * 200, hints=hints)
    assert agent.count("ttlcache_pins_active") >= 1
    url, engine = agent.server.base_url, engine_pid(agent.server)
    for _ in range(20):
        turns = [Turn(url, index) for index in range(TURNS)]
        for turn in turns:
            turn.start()
        begun = becomes(lambda t=turns: all(turn.tokens for turn in t), HANG_S)
        assert begun, "the turns did not start"
        os.kill(engine, signal.SIGSTOP)
        if all(turn.tokens < TURN_TOKENS // 2 for turn in turns):
            return Busy(url, turns)
        os.kill(engine, signal.SIGCONT)  # this process slept too long: once more
        for turn in turns:
            turn.join(HANG_S)
    pytest.fail("never were all turns under way")


def test_a_killed_engine_ends_the_server_with_an_error(tiny_model, tmp_path):
    log_path = tmp_path / "server.log"
    with start(tiny_model, log_path) as server:
        agent = Agent(server)
        one_gap(agent, "before")
        process = server._process
        working = freeze_in_mid_turn(agent)
        os.kill(engine_pid(server), signal.SIGKILL)
        log.info("exit status %d", process.wait(HANG_S))
        working.nothing_hangs()
        assert all(turn.tokens < TURN_TOKENS for turn in working.turns)
        assert any("Engine" in line for line in server.errors_in_log())
    # Nothing is lost of the recording but its last moment.
    told = output_of(app, "explain", "before", "--from", tmp_path / "recording")
    assert "turn 1" in told


def test_sigterm_drains(tiny_model, tmp_path):
    log_path = tmp_path / "server.log"
    with start(tiny_model, log_path) as server:
        agent = Agent(server)
        one_gap(agent, "after")
        assert agent.pins("claimed") == 1
        process = server._process
        working = freeze_in_mid_turn(agent)
        process.send_signal(signal.SIGTERM)
        os.kill(engine_pid(server), signal.SIGCONT)
        log.info("exit status %d", process.wait(2 * DRAIN_S))
        working.nothing_hangs()
        assert [turn.tokens for turn in working.turns] == [TURN_TOKENS] * TURNS
        ours = [line for line in server.errors_in_log() if "ttlcache" in line]
        assert ours == []
