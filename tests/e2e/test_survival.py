"""What a hostile night does to one server above a lower tier: it serves on.

The tests share two servers and run in this order; the last one ends them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest

from bench.serve.tier_server import TierServer
from tests.e2e.conftest import HANG_S, HOLD, Agent, engine_pid, start_server
from tests.e2e.loads import BLOCK, completion
from tests.waiting import becomes
from ttlcache.analysis.reader import load
from ttlcache_connector.lmcache_server.launch import TierOptions

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]

PROMPT = [5 + i * 31 % 2000 for i in range(10 * BLOCK)]
NUM_IDS = 10_000
#: Of clients of a server that ends.
PATIENCE_S = 20.0
#: After so long LMCache itself unlocks what a lookup found.
HOLD_READS_S = 60
#: Of the engine, for `NUM_IDS` programs that never come back.
MAX_GROWTH_BYTES = 200e6


class Night:
    """The servers, and what must hold after every test."""

    def __init__(self, agent: Agent, tiers: TierServer, folder: Path) -> None:
        self.agent, self.tiers, self.folder = agent, tiers, folder
        self.url = f"{agent.server.base_url}/v1/completions"
        last = {"is_last_step": True}
        self.tokens = agent.ask(PROMPT, cache_salt="first", hints=last)["token_ids"]

    def is_unharmed(self) -> None:
        """Right tokens, no hook error, and once all ended no block is referenced."""
        self.agent.empty_gpu()
        answer = self.agent.ask(PROMPT, cache_salt=f"{time.monotonic()}")
        assert answer["token_ids"] == self.tokens
        assert answer["cached_tokens"] == 0
        self.agent.empty_gpu()
        blocks = self.agent.server.options.num_blocks
        assert self.agent.reaches(
            lambda: self.agent.count("ttlcache_free_blocks") == blocks - 1
        ), "blocks stay referenced"
        assert self.agent.count("ttlcache_leaked_blocks") == 0
        assert self.agent.count("ttlcache_hook_errors_total") == 0
        assert self.agent.count("ttlcache_retention_enabled") == 1


@pytest.fixture(scope="module")
def night(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("night")
    held = ["--l1-read-ttl-seconds", str(HOLD_READS_S)]
    held += ["--session-ttl-seconds", str(HOLD_READS_S)]
    options = TierOptions(cpu_gb=0.25, chunk_tokens=BLOCK, server_args=held)
    with TierServer(options, folder / "lmcache.log") as tiers:
        extra = HOLD | {
            "policy_options": {"ttl_s": 30.0},
            "demote": "on-expiry",
            "record_path": str(folder / "recording"),
            **tiers.options.connector_config(),
        }
        with start_server(tiny_model, folder / "vllm.log", extra) as server:
            yield Night(Agent(server), tiers, folder)


@pytest.fixture
def unharmed(night):
    yield night
    night.is_unharmed()


def test_ten_thousand_ids_take_little_memory_and_no_label(unharmed):
    agent = unharmed.agent
    statm = Path(f"/proc/{engine_pid(agent.server)}/statm")

    def resident_bytes() -> int:
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    async def flood() -> None:
        limits = httpx.Limits(max_connections=32)
        async with httpx.AsyncClient(timeout=HANG_S, limits=limits) as client:
            room = asyncio.Semaphore(32)

            async def one(number: int) -> None:
                own = {"program_id": f"id-{number}", "tool": f"tool_{number}"}
                async with room:
                    asked = completion([5, 6, 7], own, 1)
                    answer = await client.post(unharmed.url, json=asked)
                assert answer.status_code == 200, answer.text

            await asyncio.gather(*(one(number) for number in range(NUM_IDS)))

    # A histogram has no line before its first value.
    agent.ask([5, 6, 7], hints={"program_id": "first", "tool": "bash"})
    agent.settle()
    series, bytes_before = set(agent.server.metrics()), resident_bytes()
    asyncio.run(flood())
    agent.settle()
    new = set(agent.server.metrics()) - series
    assert not [key for key in new if key[0].startswith("ttlcache_")]
    assert resident_bytes() - bytes_before < MAX_GROWTH_BYTES


def test_half_sent_bodies_are_nobodys_requests(unharmed):
    agent = unharmed.agent
    address = ("127.0.0.1", agent.server.port)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    head += b"Content-Type: application/json\r\n"
    beginnings = [
        head[:40],
        head + b'Content-Length: 10000\r\n\r\n{"model": "tiny", "prompt": [5, 6',
        head + b'Transfer-Encoding: chunked\r\n\r\n40\r\n{"model": "ti',
        head + b"X-Session-ID: half\r\nContent-Length: 99999999\r\n\r\n",
    ]
    with contextlib.ExitStack() as open_ones:
        for number in range(200):
            one = socket.create_connection(address, timeout=HANG_S)
            one.sendall(beginnings[number % len(beginnings)])
            if number % 2:
                one.close()
            else:
                open_ones.enter_context(one)
        answer = agent.ask(PROMPT, hints={"program_id": "whole"}, cache_salt="first")
        assert answer["token_ids"] == unharmed.tokens
        listed = agent.http.get("/ttlcache/programs").raise_for_status().text
        assert "half" not in listed
    assert agent.count("vllm:num_requests_running") == 0


def leave_mid_turn(night: Night, name: str) -> None:
    """Clients leave while their context comes from the tier and while they decode."""
    agent, contexts = night.agent, []
    for number in range(8):
        prompt = [5 + (number * 7919 + i * 13) % 2000 for i in range(12 * BLOCK)]
        hints = {"program_id": f"{name}-{number}", "tool": "bash", "ttl": "1ms"}
        contexts.append(agent.ask(prompt, hints=hints)["context"])
    held = ("ttlcache_pins_active", "ttlcache_demoting_blocks")
    assert agent.reaches(lambda: not any(map(agent.count, held)))

    def leave(context: list[int], after_s: float) -> None:
        asked = completion([*context, 9], {"program_id": f"again-{after_s}"}, 2000)
        patience = httpx.Timeout(HANG_S, read=after_s)
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(night.url, json=asked, timeout=patience)

    for attempt in range(5):
        agent.empty_gpu()
        leavers = [
            threading.Thread(target=leave, args=(context, 0.002 * 3**attempt + 0.01))
            for context in contexts
        ]
        for leaver in leavers:
            leaver.start()
        for leaver in leavers:
            leaver.join(HANG_S)
            assert not leaver.is_alive()
    assert agent.reaches(lambda: not agent.count("vllm:num_requests_running"))


def test_aborts_leave_no_block_and_no_lock_of_a_reader(unharmed):
    agent, tiers = unharmed.agent, unharmed.tiers
    for attempt in range(3):
        outages = agent.count("ttlcache_tier_outages_total")
        leave_mid_turn(unharmed, f"gone-{attempt}")
        agent.settle()
        if agent.count("ttlcache_tier_outages_total") == outages:
            # Sooner than locks time out by themselves.
            assert tiers.clear_cpu(HOLD_READS_S / 2), "locked for a reader who left"
            return
        # A busy machine: what was locked in an outage stays so until it times out.
        while not tiers.clear_cpu(HOLD_READS_S):
            agent.settle()
    pytest.fail("an outage of the lower tier in each of three attempts")


def test_files_that_vanish_under_a_server_cost_themselves_only(unharmed):
    agent, recording = unharmed.agent, unharmed.folder / "recording"
    (path,) = recording.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    os.truncate(path, path.stat().st_size // 2)
    agent.settle()  # its first event ends the line that was cut
    agent.ask(PROMPT, hints={"program_id": "truncated"})
    time.sleep(1.0)
    assert load(recording).find("truncated") is not None
    os.truncate(path, 0)
    for number in range(8):
        agent.ask([6] * 64, hints={"program_id": f"emptied-{number}"})
    path.unlink()
    agent.ask(PROMPT, hints={"program_id": "deleted"})


def test_sigterm_under_load_ends_the_server(night):
    """vLLM, plain too, leaves requests that come while it drains without an answer, and
    ends when their clients have gone."""
    agent, answers = night.agent, []

    def talk(number: int) -> None:
        hints = {"program_id": f"talker-{number}", "tool": "bash"}
        asked = completion([7 + number] * 200, hints, 16)
        with contextlib.suppress(httpx.HTTPError):
            status = 200
            while status == 200:
                answer = httpx.post(night.url, json=asked, timeout=PATIENCE_S)
                status = answer.status_code
                answers.append(status)

    talkers = [threading.Thread(target=talk, args=(n,)) for n in range(12)]
    for talker in talkers:
        talker.start()
    assert becomes(lambda: len(answers) >= 24, HANG_S)
    process = agent.server._process
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANG_S) is not None
    for talker in talkers:
        talker.join(HANG_S)
        assert not talker.is_alive()
    assert set(answers) <= {200, 500, 503}
    ours = [line for line in agent.server.errors_in_log() if "ttlcache" in line]
    assert ours == []
